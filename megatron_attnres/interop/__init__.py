"""Checkpoints as Hugging Face folders, and back."""
