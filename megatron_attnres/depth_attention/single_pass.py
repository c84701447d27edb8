"""Depth attention as one autograd node that keeps only its sources and per-token scalars.

The reference stacks its sources and lets autograd keep every step between: several tensors of
[sources, s, b, h] per reader. This form goes source by source, allocates nothing of that size, and
saves for backward the sources (which others hold anyway) and three numbers per source and token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_attnres.depth_attention.reference import check_operands


def depth_attention_single_pass(
    sources: Sequence[Tensor],
    query: Tensor,
    key_norm_weight: Tensor,
    eps: float = 1e-6,
    recency_bias: Tensor | None = None,
) -> Tensor:
    """The value of ``reference.depth_attention``, with the same operands and errors."""
    check_operands(sources, query, key_norm_weight, recency_bias)
    return _SinglePass.apply(query, key_norm_weight, recency_bias, eps, *sources)


class _SinglePass(torch.autograd.Function):
    """h = sum_i p_i v_i with p = softmax_i(u . v_i r_i), u = w g, r_i = 1 / rms(v_i)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key_norm_weight: Tensor,
        recency_bias: Tensor | None,
        eps: float,
        *sources: Tensor,
    ) -> Tensor:
        statistics = torch.promote_types(sources[0].dtype, torch.float32)
        direction = query.to(statistics) * key_norm_weight.to(statistics)
        hidden = sources[0].shape[-1]
        rows = [source.reshape(-1, hidden) for source in sources]

        # [sources, tokens] each.
        dots = torch.stack([row.to(statistics) @ direction for row in rows])
        squares = torch.stack(
            [torch.linalg.vector_norm(row, dim=-1, dtype=statistics) for row in rows]
        ).square_()
        inverse_rms = squares.div_(hidden).add_(eps).rsqrt_()
        logits = dots * inverse_rms
        if recency_bias is not None:
            logits[-1] += recency_bias.to(statistics)
        weights = torch.softmax(logits, dim=0)

        mixed = _weighted_sum(rows, weights, statistics)
        ctx.save_for_backward(
            query, key_norm_weight, recency_bias, dots, inverse_rms, weights, *sources
        )
        return mixed.to(sources[0].dtype).view_as(sources[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key_norm_weight, recency_bias, dots, inverse_rms, weights, *sources = (
            ctx.saved_tensors
        )
        statistics, hidden = weights.dtype, grad.shape[-1]
        direction = query.to(statistics) * key_norm_weight.to(statistics)
        grad_rows = grad.reshape(-1, hidden).to(statistics)
        rows = [source.reshape(-1, hidden).to(statistics) for source in sources]

        grad_weights = torch.stack([(grad_rows * row).sum(dim=-1) for row in rows])
        grad_logits = weights * (grad_weights - (weights * grad_weights).sum(dim=0))
        # d logit / d v = r u - (u . v) r^3 v / h
        along_direction = grad_logits * inverse_rms
        along_source = -along_direction * dots * inverse_rms.square() / hidden

        grad_sources = []
        grad_direction = torch.zeros_like(direction)
        for index, (source, row) in enumerate(zip(sources, rows, strict=True)):
            grad_source = grad_rows * weights[index].unsqueeze(-1)
            grad_source.addcmul_(row, along_source[index].unsqueeze(-1))
            grad_source.addr_(along_direction[index], direction)
            grad_sources.append(grad_source.to(source.dtype).view_as(source))
            grad_direction += along_direction[index] @ row

        grad_query = (grad_direction * key_norm_weight.to(statistics)).to(query.dtype)
        grad_key_norm = (grad_direction * query.to(statistics)).to(key_norm_weight.dtype)
        grad_bias = None
        if recency_bias is not None:
            grad_bias = grad_logits[-1].sum().to(recency_bias.dtype).view_as(recency_bias)
        return grad_query, grad_key_norm, grad_bias, None, *grad_sources


def _weighted_sum(rows: Sequence[Tensor], weights: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_i weights[i] rows[i], [tokens, h]."""
    total = rows[0].to(dtype) * weights[0].unsqueeze(-1)
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total.addcmul_(row.to(dtype), weight.unsqueeze(-1))
    return total
