"""RMSNorm that works under sequence parallelism."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, statistics in float32 or wider.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        dtype: data type of the weight.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [..., size]."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
