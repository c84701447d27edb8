"""Pretraining of Transformers with Attention Residuals (arXiv:2603.15031)."""

__version__ = "0.1.0"
__all__ = ["depth_attention"]

# The package is callable: its name is the operator's. It does not load torch.
from megatron_attnres import depth_attention
