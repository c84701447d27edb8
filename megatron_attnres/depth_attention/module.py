"""The learned part of depth attention: one pseudo-query and one key norm per reader."""

import torch
from torch import Tensor, nn

from megatron_attnres.depth_attention.single_pass import depth_attention_single_pass
from megatron_attnres.depth_attention.state import DepthState


class DepthAttention(nn.Module):
    """Reads the depth state on behalf of one sublayer or of the output head.

    The pseudo-query starts at zero (equal weights), the key norm at one (paper section 3.1).
    Neither takes weight decay.

    Args:
        hidden_size: h.
        eps: of the key norm; the same as the model's norms.
        recency_bias: initial value of the learned scalar on the newest source; None leaves it out.
        dtype: data type of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        recency_bias: float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.query = nn.Parameter(torch.zeros(hidden_size, dtype=dtype))
        self.key_norm_weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.recency_bias: nn.Parameter | None = None
        if recency_bias is not None:
            self.recency_bias = nn.Parameter(torch.tensor([recency_bias], dtype=dtype))
        for parameter in self.parameters():
            parameter.no_weight_decay = True

    def forward(self, state: DepthState) -> Tensor:
        """The reader's input, [s, b, h]."""
        return depth_attention_single_pass(
            state.readable(), self.query, self.key_norm_weight, self.eps, self.recency_bias
        )


class ResidualRead(nn.Module):
    """Baseline mode's reader: the residual stream as it is."""

    def forward(self, state: DepthState) -> Tensor:
        """The residual stream, [s, b, h]."""
        assert state.partial is not None, "the residual stream is missing from the depth state"
        return state.partial
