"""Pretraining of Transformers with Attention Residuals (arXiv:2603.15031)."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["depth_attention"]


def __getattr__(name: str) -> Any:
    # Resolved on first use: commands that only compute a plan or check flags never load torch.
    if name == "depth_attention":
        from megatron_attnres.depth_attention.reference import depth_attention

        return depth_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
