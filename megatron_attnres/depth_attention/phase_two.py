"""Phase 2 of two (paper, algorithm 1): a sublayer merges the partial sum into phase 1's result.

A softmax over summaries and partial sum is one over two: the summaries together, whose logit is
the logarithm of their denominator, and the partial sum.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_attnres.depth_attention.phase_one import Attended
from megatron_attnres.depth_attention.statistics import inverse_rms
from megatron_attnres.depth_attention.tiles import as_rows, token_tiles, widened, written


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
        if len(_tiles(partial, direction.dtype)) == 1:
            return _merge_at_once(*attended[:2], partial, direction, eps, recency_bias)
        return _merge(*attended[:2], partial, direction, eps, recency_bias)[0]
    # Twice, autograd would add up what comes back for o and for its scale, each on its own.
    if getattr(attended.scale, "is_merged", False):
        raise RuntimeError("what phase 1 found for a sublayer was merged before; read ahead again")
    attended.scale.is_merged = True
    return _PhaseTwo.apply(*attended, partial, direction, eps, recency_bias)


def _merge_at_once(
    mixed: Tensor,
    log_sum: Tensor,
    partial: Tensor,
    direction: Tensor,
    eps: float,
    recency_bias: Tensor | None,
) -> Tensor:
    """Without gradients and for few tokens: in as few operations as it takes."""
    values = as_rows(partial).to(direction.dtype)
    lead = (values @ direction).mul_(inverse_rms(values, eps)).neg_().add_(log_sum)
    if recency_bias is not None:
        lead -= recency_bias.reshape(())
    # Both from the difference, as below.
    share, own_share = torch.sigmoid(lead), torch.sigmoid(lead.neg_())
    merged = torch.mul(as_rows(mixed), share.unsqueeze(-1))
    return merged.addcmul_(values, own_share.unsqueeze(-1)).to(partial.dtype).view_as(partial)


class _PhaseTwo(torch.autograd.Function):
    """A tile of tokens at a time, in the data type of the statistics; only results are rounded."""

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
        merged, scalars = _merge(mixed, log_sum, partial, direction, eps, recency_bias)
        ctx.save_for_backward(mixed, partial, direction, recency_bias, *scalars)
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mixed, partial, direction, recency_bias, inverse, logit, share, own_share = (
            ctx.saved_tensors
        )
        hidden, wide = partial.shape[-1], direction.dtype
        rows, others, grad_rows = as_rows(partial), as_rows(mixed), as_rows(grad)
        grad_partial = torch.empty_like(rows, memory_format=torch.contiguous_format)
        grad_log_sum, grad_direction = torch.empty_like(logit), torch.zeros_like(direction)
        slope = share * own_share

        tiles = _tiles(partial, wide)
        workspaces = direction.new_empty(5, tiles[0].stop, hidden)
        for tile in tiles:
            values = widened(rows, tile, workspaces[0])
            grad_values = widened(grad_rows, tile, workspaces[1])
            difference = torch.sub(
                widened(others, tile, workspaces[2]), values, out=workspaces[3][: len(values)]
            )
            grad_share = difference.mul_(grad_values).sum(dim=-1)
            grad_lead = torch.mul(grad_share, slope[tile], out=grad_log_sum[tile])
            # d l / d v = r u - l r^2 v / h, and the partial sum's logit gets what L does not.
            along_direction = grad_lead.neg().mul_(inverse[tile])
            along_values = (along_direction * logit[tile]).mul_(inverse[tile]).div_(-hidden)
            with written(grad_partial, tile, workspaces[4]) as grad_tile:
                torch.mul(grad_values, own_share[tile].unsqueeze(-1), out=grad_tile)
                grad_tile.addcmul_(values, along_values.unsqueeze(-1))
                grad_tile.addcmul_(along_direction.unsqueeze(-1), direction)
            grad_direction.addmv_(values.t(), along_direction)

        grad_bias = None
        if recency_bias is not None:
            grad_bias = -grad_log_sum.sum().to(recency_bias.dtype).view_as(recency_bias)
        return (
            # The gradient of o is a times grad; see Attended.
            grad,
            grad_log_sum,
            share.unsqueeze(-1),
            grad_partial.view_as(partial),
            grad_direction,
            None,
            grad_bias,
        )


def _merge(
    mixed: Tensor,
    log_sum: Tensor,
    partial: Tensor,
    direction: Tensor,
    eps: float,
    recency_bias: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The merged sources, and of every token: 1 / rms, logit, a and 1 - a."""
    rows, others = as_rows(partial), as_rows(mixed)
    merged = torch.empty_like(rows, memory_format=torch.contiguous_format)
    scalars = []
    tiles = _tiles(partial, direction.dtype)
    workspaces = direction.new_empty(3, tiles[0].stop, rows.shape[-1])
    for tile in tiles:
        values = widened(rows, tile, workspaces[0])
        inverse = inverse_rms(values, eps)
        logit = (values @ direction).mul_(inverse)
        lead = log_sum[tile] - logit
        if recency_bias is not None:
            lead -= recency_bias.reshape(()).to(lead.dtype)
        # Both from the difference: 1 - a loses what a small share has of digits.
        share, own_share = torch.sigmoid(lead), torch.sigmoid(lead.neg_())
        with written(merged, tile, workspaces[1]) as merged_tile:
            torch.mul(
                widened(others, tile, workspaces[2]), share.unsqueeze(-1), out=merged_tile
            ).addcmul_(values, own_share.unsqueeze(-1))
        scalars.append((inverse, logit, share, own_share))
    if len(scalars) == 1:
        return merged.view_as(partial), scalars[0]
    return merged.view_as(partial), tuple(map(torch.cat, zip(*scalars, strict=True)))


def _tiles(partial: Tensor, wide: torch.dtype) -> list[slice]:
    # Large ones: what is read first comes from memory anyway, and short stretches start slowly.
    hidden = partial.shape[-1]
    return token_tiles(partial.numel() // hidden, 2 * hidden * wide.itemsize, partial.device)
