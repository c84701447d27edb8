"""Phase 1 of two (paper, algorithm 1): a block's sublayers attend to the completed summaries.

The pseudo-queries of a block are known before it runs, so one pass over the summaries serves all
its sublayers: logits and sums are matrix products, and backward runs once for all of them.

A pipeline may cut a block between two layers, and yet every layout is to give one process's bits.
So products have the shape of the whole block, with zeros for the queries of other chunks, and the
gradients of the summaries pass through the node, which adds to them layer by layer: a sum that a
cut leaves as it is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_attnres.depth_attention.statistics import statistics_dtype
from megatron_attnres.depth_attention.tiles import as_rows, gather, scatter, token_tiles


class Attended(NamedTuple):
    """What one query found in the summaries.

    Attributes:
        mixed: o_s, [..., h]. Its gradient is whatever comes back for it times what comes back for
            ``scale``: phase 2 returns both factors, and phase 1 multiplies them tile by tile,
            which saves a tensor of this size per sublayer.
        log_sum: L_s, the logarithm of the softmax's denominator, [tokens] in the data type of the
            statistics; a number of Python's where a single token is decoded.
        scale: 1 for every token, [tokens, 1]; here for its gradient's sake, None without.
    """

    mixed: Tensor
    log_sum: Tensor | float
    scale: Tensor | None = None


class Found(NamedTuple):
    """What phase 1 returns.

    Attributes:
        attended: for each query.
        summaries: as they were. Later readers should take them from here: what their gradients
            get from later blocks is then added up in this node, not by autograd in a pass of
            its own.
    """

    attended: tuple[Attended, ...]
    summaries: tuple[Tensor, ...]


def attend_to_summaries(
    summaries: Sequence[Tensor],
    inverse_rms: Sequence[Tensor],
    directions: Tensor,
    newest_bias: Tensor | None = None,
    layers: Sequence[slice] | None = None,
) -> Found:
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
        layers: the queries of each layer, ascending and without a gap, by default all as one.
            Queries before and after them stand for those of other chunks: they find nothing.
    """
    layers = layers or (slice(0, directions.shape[0]),)
    stacked = torch.stack(tuple(inverse_rms), dim=1)
    if not torch.is_grad_enabled() and len(_tiles(summaries)) == 1:
        found = _attend_at_once(summaries, stacked, directions, newest_bias)
        return Found(tuple(found[_all_of(layers)]), tuple(summaries))
    results = _PhaseOne.apply(directions, newest_bias, layers, stacked, *summaries)
    results, passed = results[: -len(summaries)], results[-len(summaries) :]
    queries = len(results) // 3
    return Found(tuple(Attended(*results[query::queries]) for query in range(queries)), passed)


def _attend_at_once(
    summaries: Sequence[Tensor],
    inverse_rms: Tensor,
    directions: Tensor,
    newest_bias: Tensor | None,
) -> list[Attended]:
    """Without gradients and for few tokens: in as few operations as it takes."""
    count, queries, shape = len(summaries), directions.shape[0], summaries[0].shape
    values = torch.stack(tuple(summaries), dim=-2).view(-1, count, shape[-1])
    dots = values.to(directions.dtype).view(-1, shape[-1]) @ directions.t()
    logits = dots.view(-1, count, queries).mul_(inverse_rms.unsqueeze(-1))
    if newest_bias is not None:
        logits[:, -1, 0] += newest_bias.reshape(()).to(logits.dtype)
    weights = torch.softmax(logits, dim=1).to(values.dtype)
    mixed = torch.bmm(weights.transpose(1, 2), values).view(*shape[:-1], queries, shape[-1])
    log_sums = torch.logsumexp(logits, dim=1)
    return list(map(Attended, mixed.unbind(-2), log_sums.unbind(1)))


class _PhaseOne(torch.autograd.Function):
    """All in the data type of the statistics, a tile at a time; only results are rounded."""

    @staticmethod
    def forward(
        ctx: Any,
        directions: Tensor,
        newest_bias: Tensor | None,
        layers: Sequence[slice],
        inverse_rms: Tensor,
        *summaries: Tensor,
    ) -> tuple[Tensor, ...]:
        (tokens, count), (queries, hidden) = inverse_rms.shape, directions.shape
        own = _all_of(layers)
        rows = [as_rows(summary) for summary in summaries]
        mixed = rows[0].new_empty(tokens, own.stop - own.start, hidden)
        logits = directions.new_empty(tokens, count, queries)
        weights, log_sums = torch.empty_like(logits), directions.new_empty(queries, tokens)

        tiles = _tiles(summaries)
        workspaces = [directions.new_empty(tiles[0].stop, n, hidden) for n in (count, queries)]
        for tile in tiles:
            values = gather(rows, tile, workspaces[0])
            dots = values.view(-1, hidden) @ directions.t()
            logit = dots.view(-1, count, queries).mul_(inverse_rms[tile].unsqueeze(-1))
            logits[tile] = logit
            if newest_bias is not None:
                logit[:, -1, 0] += newest_bias.reshape(()).to(logit.dtype)
            weights[tile], log_sums[:, tile] = _softmax(logit)
            out = workspaces[1][: values.shape[0]]
            torch.bmm(weights[tile].transpose(1, 2), values, out=out)
            mixed[tile] = out[:, own]

        ctx.layers = layers
        ctx.save_for_backward(directions, newest_bias, inverse_rms, logits, weights, *summaries)
        ctx.set_materialize_grads(False)
        scales = torch.ones_like(log_sums).unsqueeze(-1)
        return (
            *(one.view_as(summaries[0]) for one in mixed.unbind(1)),
            *log_sums[own].unbind(),
            *scales[own].unbind(),
            *(summary.view_as(summary) for summary in summaries),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        directions, newest_bias, inverse_rms, logits, weights, *summaries = ctx.saved_tensors
        count, (queries, hidden) = len(summaries), directions.shape
        own = _all_of(ctx.layers)
        number = own.stop - own.start
        rows = [as_rows(summary) for summary in summaries]
        grad_mixed = [as_rows(grad) for grad in _or_zeros(grads[:number], summaries[0])]
        grad_log_sums = torch.zeros_like(weights[:, 0])
        grad_log_sums[:, own] = torch.stack(
            _or_zeros(grads[number : 2 * number], inverse_rms[:, 0]), dim=1
        )
        scales = grads[2 * number : 3 * number]
        passing = grads[3 * number :]
        if any(grad is not None for grad in passing):
            passing = [as_rows(grad) for grad in _or_zeros(passing, summaries[0])]
        else:
            passing = []

        grad_rows = [torch.empty_like(row, memory_format=torch.contiguous_format) for row in rows]
        grad_directions = torch.zeros_like(directions)
        grad_bias = directions.new_zeros(())
        tiles = _tiles(summaries)
        workspaces = [
            directions.new_empty(tiles[0].stop, n, hidden) for n in (count, queries, count)
        ]
        workspaces[1].zero_()
        for tile in tiles:
            values = gather(rows, tile, workspaces[0])
            gather(grad_mixed, tile, workspaces[1][:, own], scales)
            grad_values = workspaces[1][: values.shape[0]]
            weight, inverse = weights[tile], inverse_rms[tile].unsqueeze(-1)

            grad_weight = torch.bmm(values, grad_values.transpose(1, 2))
            centre = (weight * grad_weight).sum(dim=1) - grad_log_sums[tile]
            grad_logit = grad_weight.sub_(centre.unsqueeze(1)).mul_(weight)
            if newest_bias is not None:
                grad_bias += grad_logit[:, -1, 0].sum()

            # d l / d v = r u - l r^2 v / h
            along_values = (grad_logit * logits[tile]).mul_(inverse).mul_(inverse).div_(-hidden)
            along_directions = grad_logit.mul_(inverse)
            grad_tile = gather(passing, tile, workspaces[2])
            for layer in reversed(ctx.layers):
                along_own = along_values[:, :, layer].sum(dim=2, keepdim=True)
                if passing or layer is not ctx.layers[-1]:
                    grad_tile.addcmul_(values, along_own)
                else:
                    torch.mul(values, along_own, out=grad_tile)
                grad_tile.baddbmm_(weight[:, :, layer], grad_values[:, layer])
                # The directions are the same for every token, but one product of all is slower.
                grad_tile.baddbmm_(
                    along_directions[:, :, layer],
                    directions[layer].expand(values.shape[0], -1, -1),
                )
            scatter(grad_tile, grad_rows, tile)
            grad_directions.addmm_(along_directions.view(-1, queries).t(), values.view(-1, hidden))

        shaped = (one.view_as(summary) for one, summary in zip(grad_rows, summaries, strict=True))
        if newest_bias is None:
            return grad_directions, None, None, None, *shaped
        grad_bias = grad_bias.to(newest_bias.dtype).view_as(newest_bias)
        return grad_directions, grad_bias, None, None, *shaped


def _all_of(layers: Sequence[slice]) -> slice:
    return slice(layers[0].start, layers[-1].stop)


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Over the summaries of [tile, summaries, queries]: weights, and log-sums [queries, tile]."""
    largest = logits.amax(dim=1, keepdim=True)
    weights = (logits - largest).exp_()
    denominator = weights.sum(dim=1, keepdim=True)
    weights /= denominator
    return weights, denominator.log_().add_(largest).squeeze(1).t()


def _or_zeros(grads: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """Zeros in place of the gradient of a result that nothing used."""
    zeros = like.new_zeros(()).expand_as(like)
    return [zeros if grad is None else grad for grad in grads]


def _tiles(sources: Sequence[Tensor]) -> list[slice]:
    first = sources[0]
    hidden, wide = first.shape[-1], statistics_dtype(first.dtype)
    bytes_per_token = len(sources) * hidden * wide.itemsize
    return token_tiles(first.numel() // hidden, bytes_per_token, first.device)
