"""Phase 1 of two (paper, algorithm 1): a block's sublayers attend to the completed summaries.

The pseudo-queries of a block are known before it runs, so one pass over the summaries serves all
its sublayers: logits and sums are matrix products, and backward runs once for all of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_attnres.depth_attention.tiles import as_rows, gather, scatter, token_tiles


def attend_to_summaries(
    summaries: Sequence[Tensor],
    inverse_rms: Sequence[Tensor],
    directions: Tensor,
    newest_bias: Tensor | None = None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Softmax attention of several queries over completed summaries.

        o_s = sum_j p_sj v_j        p_sj = exp(l_sj - L_s)        l_sj = u_s . v_j r_j

    Nothing of the size of all summaries is allocated but, in backward, their gradients. Saved for
    backward are the summaries themselves and, per token, summary and query, logit and weight.

    Args:
        summaries: v_0 .. v_(k-1), oldest first, each [..., h].
        inverse_rms: r_j of each, [tokens], in the data type of the statistics.
        directions: u_s = w_s g_s, pseudo-query times key-norm weight, [S, h] in the data type of
            the statistics.
        newest_bias: added to the first query's logit of the newest summary: the recency bias of a
            block's first sublayer, or of the head. The bias of other sublayers belongs to their
            partial sum.

    Returns:
        o_s of every query, each of the summaries' shape and data type, and the logarithm L_s of
        its softmax's denominator, [tokens] in the data type of the statistics.
    """
    stacked = torch.stack(tuple(inverse_rms), dim=1)
    results = _PhaseOne.apply(directions, newest_bias, stacked, *summaries)
    queries = directions.shape[0]
    return results[:queries], results[queries:]


class _PhaseOne(torch.autograd.Function):
    """Logits, softmax and statistics in the wide type, products over h in the summaries' own."""

    @staticmethod
    def forward(
        ctx: Any,
        directions: Tensor,
        newest_bias: Tensor | None,
        inverse_rms: Tensor,
        *summaries: Tensor,
    ) -> tuple[Tensor, ...]:
        (tokens, count), (queries, hidden) = inverse_rms.shape, directions.shape
        rows = [as_rows(summary) for summary in summaries]
        dtype, wide = rows[0].dtype, directions.dtype
        mixed = rows[0].new_empty(tokens, queries, hidden)
        logits = directions.new_empty(tokens, count, queries)
        weights, log_sums = torch.empty_like(logits), directions.new_empty(queries, tokens)

        tiles = _tiles(rows)
        workspace = rows[0].new_empty(tiles[0].stop, count, hidden)
        for tile in tiles:
            values = gather(rows, tile, workspace)
            dots = values.to(wide).view(-1, hidden) @ directions.t()
            logit = dots.view(-1, count, queries).mul_(inverse_rms[tile].unsqueeze(-1))
            logits[tile] = logit
            if newest_bias is not None:
                logit[:, -1, 0] += newest_bias.to(wide)
            weights[tile], log_sums[:, tile] = _softmax(logit)
            torch.bmm(weights[tile].to(dtype).transpose(1, 2), values, out=mixed[tile])

        ctx.save_for_backward(directions, newest_bias, inverse_rms, logits, weights, *summaries)
        ctx.set_materialize_grads(False)
        return *(one.view_as(summaries[0]) for one in mixed.unbind(1)), *log_sums.unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        directions, newest_bias, inverse_rms, logits, weights, *summaries = ctx.saved_tensors
        count, (queries, hidden) = len(summaries), directions.shape
        rows = [as_rows(summary) for summary in summaries]
        dtype, wide = rows[0].dtype, directions.dtype
        grad_mixed = [as_rows(grad) for grad in _or_zeros(grads[:queries], summaries[0])]
        grad_log_sums = torch.stack(_or_zeros(grads[queries:], inverse_rms[:, 0]), dim=1)

        grad_rows = [torch.empty_like(row, memory_format=torch.contiguous_format) for row in rows]
        grad_directions = torch.zeros_like(directions)
        grad_bias = None if newest_bias is None else torch.zeros_like(newest_bias)
        narrow_directions = directions.to(dtype)
        tiles = _tiles(rows)
        workspaces = [rows[0].new_empty(tiles[0].stop, n, hidden) for n in (count, queries, count)]
        for tile in tiles:
            values = gather(rows, tile, workspaces[0])
            grad_values = gather(grad_mixed, tile, workspaces[1])
            weight, inverse = weights[tile], inverse_rms[tile].unsqueeze(-1)

            grad_weight = torch.bmm(values, grad_values.transpose(1, 2)).to(wide)
            centre = (weight * grad_weight).sum(dim=1) - grad_log_sums[tile]
            grad_logit = grad_weight.sub_(centre.unsqueeze(1)).mul_(weight)
            if grad_bias is not None:
                grad_bias += grad_logit[:, -1, 0].sum().to(grad_bias.dtype)

            # d l / d v = r u - l r^2 v / h
            along_values = (grad_logit * logits[tile]).sum(dim=2, keepdim=True)
            along_values.mul_(inverse).mul_(inverse).div_(-hidden)
            along_directions = grad_logit.mul_(inverse).to(dtype)
            grad_tile = torch.mul(
                values, along_values.to(dtype), out=workspaces[2][: values.shape[0]]
            )
            grad_tile.baddbmm_(weight.to(dtype), grad_values)
            _add_product(grad_tile, along_directions, narrow_directions)
            scatter(grad_tile, grad_rows, tile)
            grad_directions += along_directions.view(-1, queries).t() @ values.view(-1, hidden)

        shaped = (one.view_as(summary) for one, summary in zip(grad_rows, summaries, strict=True))
        return grad_directions, grad_bias, None, *shaped


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Over the summaries of [tile, summaries, queries]: weights, and log-sums [queries, tile]."""
    largest = logits.amax(dim=1, keepdim=True)
    weights = (logits - largest).exp_()
    denominator = weights.sum(dim=1, keepdim=True)
    weights /= denominator
    return weights, denominator.log_().add_(largest).squeeze(1).t()


def _add_product(target: Tensor, factors: Tensor, directions: Tensor) -> None:
    """target [tile, summaries, h] += factors [tile, summaries, queries] directions [queries, h].

    The same directions serve every token, so one product would do; on a CPU the batched one is
    three times faster in float32 and half as fast in bfloat16.
    """
    if target.device.type == "cpu" and target.dtype == torch.float32:
        target.baddbmm_(factors, directions.expand(target.shape[0], -1, -1))
    else:
        target.view(-1, target.shape[-1]).addmm_(factors.view(-1, factors.shape[-1]), directions)


def _or_zeros(grads: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """Zeros in place of the gradient of a result that nothing used."""
    return [torch.zeros_like(like) if grad is None else grad for grad in grads]


def _tiles(rows: Sequence[Tensor]) -> list[slice]:
    tokens, hidden = rows[0].shape
    return token_tiles(tokens, len(rows) * hidden * rows[0].element_size(), rows[0].device)
