"""Transformer layers, a pipeline stage's stack of them, and the GPT model."""
