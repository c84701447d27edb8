"""The wide data type of depth attention's statistics, and the norm of a source."""

import torch
from torch import Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for sources of at most 32 bits, float64 for float64 (DESIGN section 2)."""
    return torch.promote_types(dtype, torch.float32)


def inverse_rms(source: Tensor, eps: float) -> Tensor:
    """1 / rms of every token's source: one number per token, without a graph.

    Gradients through the norm are part of the phases' own backward, so a completed summary's
    statistics are computed once, whoever reads it.

    Args:
        source: [..., h].
        eps: added to the mean square before the root.

    Returns:
        [tokens] in the data type of the statistics.
    """
    hidden = source.shape[-1]
    rows = source.detach().reshape(-1, hidden)
    norm = torch.linalg.vector_norm(rows, dim=-1, dtype=statistics_dtype(source.dtype))
    return norm.square_().div_(hidden).add_(eps).rsqrt_()
