"""Phase 2 of two (paper, algorithm 1): a sublayer merges the partial sum into phase 1's result.

A softmax over summaries and partial sum is one over two: the summaries together, whose logit is
the logarithm of their denominator, and the partial sum.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_attnres.depth_attention.phase_one import Attended
from megatron_attnres.depth_attention.statistics import inverse_rms
from megatron_attnres.depth_attention.tiles import as_rows


def merge_partial_sum(
    attended: Attended,
    partial: Tensor,
    direction: Tensor,
    eps: float,
    recency_bias: Tensor | None = None,
) -> Tensor:
    """h = a o + (1 - a) v with 1 - a = exp(l) / (exp(L) + exp(l)), l = u . v r + bias.

    Args:
        attended: o and L, what phase 1 made of the summaries; used once.
        partial: v, the partial sum, of o's shape and data type.
        direction: u, pseudo-query times key-norm weight, [h] in the data type of the statistics.
        eps: added to the partial sum's mean square.
        recency_bias: added to the partial sum's logit.

    Returns:
        The sublayer's input, of the partial sum's shape and data type.

    Raises:
        RuntimeError: what phase 1 found is used a second time, with gradients.
    """
    if not torch.is_grad_enabled():
        return _merge_at_once(attended, partial, direction, eps, recency_bias)
    # Twice, autograd would add up what comes back for o and for its scale, each on its own.
    if getattr(attended.scale, "is_merged", False):
        raise RuntimeError("what phase 1 found for a sublayer was merged before; read ahead again")
    attended.scale.is_merged = True
    return _PhaseTwo.apply(*attended, partial, direction, eps, recency_bias)


def _merge_at_once(
    attended: Attended,
    partial: Tensor,
    direction: Tensor,
    eps: float,
    recency_bias: Tensor | None,
) -> Tensor:
    """Without gradients: in as few operations as it takes."""
    rows = as_rows(partial)
    wide_rows = rows.to(direction.dtype)
    lead = torch.addcmul(
        attended.log_sum, wide_rows @ direction, inverse_rms(wide_rows, eps), value=-1
    )
    if recency_bias is not None:
        lead -= recency_bias.reshape(()).to(lead.dtype)
    share = torch.sigmoid(lead).unsqueeze(-1).to(rows.dtype)
    own_share = torch.sigmoid(lead.neg_()).unsqueeze(-1).to(rows.dtype)
    return (as_rows(attended.mixed) * share).addcmul_(rows, own_share).view_as(partial)


class _PhaseTwo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        log_sum: Tensor,
        scale: Tensor,
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
            lead -= recency_bias.reshape(()).to(lead.dtype)
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
            # The gradient of o is a times grad; see Attended.
            grad,
            grad_log_sum,
            share,
            grad_partial.view_as(partial),
            along_direction @ rows.to(wide),
            None,
            grad_bias,
        )
