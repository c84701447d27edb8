"""Configuration, the training loop, metrics and checkpoints."""
