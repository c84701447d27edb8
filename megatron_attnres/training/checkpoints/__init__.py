"""Checkpoints that any layout can load, written by torch.distributed.checkpoint."""
