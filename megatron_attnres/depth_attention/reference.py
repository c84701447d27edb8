"""Depth attention, plain and exact: the definition that every faster path is held against."""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor


@overload
def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_norm_weight: Tensor,
    eps: float = ...,
    recency_bias: Tensor | float | None = ...,
    return_weights: Literal[False] = ...,
) -> Tensor: ...


@overload
def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_norm_weight: Tensor,
    eps: float = ...,
    recency_bias: Tensor | float | None = ...,
    *,
    return_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_norm_weight: Tensor,
    eps: float = 1e-6,
    recency_bias: Tensor | float | None = None,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mix sources by softmax attention over depth (paper equations 2 to 4).

        h = sum_i p_i v_i        p = softmax_i(w . RMSNorm(v_i; g))

    Keys are normalised, values are not. Statistics, logits and softmax are computed in float32
    (float64 for float64 sources), whatever the sources' data type.

    Args:
        sources: v_0 .. v_k, oldest first, each [..., h] and of one shape, data type and device.
        query: w, the sublayer's learned pseudo-query, [h].
        key_norm_weight: g, the learned weight of the keys' norm, [h].
        eps: added to the mean square of a source before the root.
        recency_bias: one number added to the logit of the newest (last) source.
        return_weights: also return p.

    Returns:
        h, [..., h] in the sources' data type; with ``return_weights`` also p, [k + 1, ...] in the
        data type of the statistics.

    Raises:
        ValueError: no source, sources that differ in shape, data type or device, or a query or
            key-norm weight that is not [h].
    """
    check_operands(sources, query, key_norm_weight, recency_bias)
    values = torch.stack(tuple(sources))
    statistics_dtype = torch.promote_types(values.dtype, torch.float32)
    wide = values.to(statistics_dtype)

    inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    keys = wide * inverse_rms * key_norm_weight.to(statistics_dtype)
    logits = keys @ query.to(statistics_dtype)
    if recency_bias is not None:
        bias = torch.as_tensor(recency_bias, dtype=statistics_dtype, device=logits.device)
        logits = torch.cat((logits[:-1], logits[-1:] + bias))
    weights = torch.softmax(logits, dim=0)
    mixed = (weights.unsqueeze(-1) * wide).sum(dim=0).to(values.dtype)
    return (mixed, weights) if return_weights else mixed


def check_operands(
    sources: Sequence[Tensor],
    query: Tensor,
    key_norm_weight: Tensor,
    recency_bias: Tensor | float | None,
) -> None:
    """Refuse operands of ``depth_attention`` that do not belong together.

    Raises:
        ValueError: names the operand, what it is and what is allowed.
    """
    if not sources:
        raise ValueError("sources is empty; depth attention needs at least one source")
    first = sources[0]
    for index, source in enumerate(sources):
        if (source.shape, source.dtype, source.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"sources[{index}] is {_describe(source)}, sources[0] is {_describe(first)}; "
                "all sources must share shape, data type and device"
            )
    if not first.is_floating_point():
        raise ValueError(f"sources are {first.dtype}; they must be floating-point tensors")
    hidden = first.shape[-1] if first.ndim else 0
    for name, vector in (("query", query), ("key_norm_weight", key_norm_weight)):
        if vector.shape != (hidden,):
            raise ValueError(
                f"{name} has shape {tuple(vector.shape)}; it must be ({hidden},), "
                "the last dimension of the sources"
            )
    if isinstance(recency_bias, Tensor) and recency_bias.numel() != 1:
        raise ValueError(
            f"recency_bias has shape {tuple(recency_bias.shape)}; it must be one number"
        )


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
