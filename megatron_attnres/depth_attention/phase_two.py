"""Phase 2 of two (paper, algorithm 1): a sublayer merges the partial sum into phase 1's result.

A softmax over summaries and partial sum is one over two: the summaries together, whose logit is
the logarithm of their denominator, and the partial sum.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_attnres.depth_attention.statistics import inverse_rms
from megatron_attnres.depth_attention.tiles import as_rows


def merge_partial_sum(
    mixed: Tensor,
    log_sum: Tensor,
    partial: Tensor,
    direction: Tensor,
    eps: float,
    recency_bias: Tensor | None = None,
) -> Tensor:
    """h = a o + (1 - a) v with 1 - a = exp(l) / (exp(L) + exp(l)), l = u . v r + bias.

    Args:
        mixed: o, what phase 1 made of the summaries, [..., h].
        log_sum: L, the logarithm of its softmax's denominator, [tokens].
        partial: v, the partial sum, of the same shape and data type as o.
        direction: u, pseudo-query times key-norm weight, [h] in the data type of the statistics.
        eps: added to the partial sum's mean square.
        recency_bias: added to the partial sum's logit.

    Returns:
        The sublayer's input, of the partial sum's shape and data type.
    """
    return _PhaseTwo.apply(mixed, log_sum, partial, direction, eps, recency_bias)


class _PhaseTwo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        log_sum: Tensor,
        partial: Tensor,
        direction: Tensor,
        eps: float,
        recency_bias: Tensor | None,
    ) -> Tensor:
        rows, others = as_rows(partial), as_rows(mixed)
        wide_rows = rows.to(direction.dtype)
        inverse = inverse_rms(wide_rows, eps)
        logit = (wide_rows @ direction).mul_(inverse)
        lead = log_sum - logit
        if recency_bias is not None:
            lead -= recency_bias.to(lead.dtype)
        # Both from the difference: 1 - a loses what a small share has of digits.
        share, own_share = torch.sigmoid(lead).unsqueeze(-1), torch.sigmoid(-lead).unsqueeze(-1)
        merged = (others * share.to(rows.dtype)).addcmul_(rows, own_share.to(rows.dtype))
        ctx.save_for_backward(
            mixed, partial, direction, recency_bias, inverse, logit, share, own_share
        )
        return merged.view_as(partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mixed, partial, direction, recency_bias, inverse, logit, share, own_share = (
            ctx.saved_tensors
        )
        dtype, wide = partial.dtype, direction.dtype
        rows, others, grad_rows = as_rows(partial), as_rows(mixed), as_rows(grad)

        grad_share = (others - rows).mul_(grad_rows).sum(dim=-1, dtype=wide)
        grad_log_sum = grad_share.mul_(share.squeeze(-1)).mul_(own_share.squeeze(-1))
        # d l / d v = r u - l r^2 v / h, and the partial sum's logit gets what L does not.
        along_direction = -grad_log_sum * inverse
        along_rows = (along_direction * logit).mul_(inverse).div_(-partial.shape[-1])
        grad_partial = grad_rows * own_share.to(dtype)
        grad_partial.addcmul_(rows, along_rows.unsqueeze(-1).to(dtype))
        grad_partial.addcmul_(along_direction.unsqueeze(-1).to(dtype), direction.to(dtype))

        grad_bias = None
        if recency_bias is not None:
            grad_bias = -grad_log_sum.sum().to(recency_bias.dtype).view_as(recency_bias)
        return (
            (grad_rows * share.to(dtype)).view_as(mixed),
            grad_log_sum,
            grad_partial.view_as(partial),
            along_direction @ rows.to(wide),
            None,
            grad_bias,
        )
