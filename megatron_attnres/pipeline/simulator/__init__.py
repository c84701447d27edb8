"""Predicts a pipeline step: Megatron-Core's schedule order over a described cluster."""
