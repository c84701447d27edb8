"""Which implementation of depth attention runs, and the one signature that all of them share.

- ``two-phase``: ours, any device (``phase_one``, ``phase_two``).
- ``fused``: the Triton operator of flash-linear-attention (fla-core), CUDA only, one read at a
  time, without recency bias.
- ``plain``: the reference. Slow; for looking for faults.

``auto`` takes the fused operator for reads on CUDA that it can do, where fla-core is installed, and
two phases otherwise. Which is faster on a GPU has not been measured yet.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import get_args

import torch
from torch import Tensor

from megatron_attnres.depth_attention import reference
from megatron_attnres.depth_attention.names import OperatorName
from megatron_attnres.depth_attention.phase_one import attend_to_summaries
from megatron_attnres.depth_attention.statistics import inverse_rms, statistics_dtype

Operator = Callable[[Sequence[Tensor], Tensor, Tensor, float, Tensor | float | None], Tensor]


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    key_norm_weight: Tensor,
    eps: float = 1e-6,
    recency_bias: Tensor | float | None = None,
    return_weights: bool = False,
    operator: OperatorName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """One read of the depth state: ``reference.depth_attention`` by a chosen implementation.

    Args:
        sources: v_0 .. v_k, oldest first, each [..., h] and of one shape, data type and device.
        query: w, [h].
        key_norm_weight: g, [h].
        eps: added to the mean square of a source before the root.
        recency_bias: one number added to the logit of the newest (last) source.
        return_weights: also return p, [k + 1, ...]. They come from the plain form.
        operator: see the module.

    Returns:
        h, [..., h]; with ``return_weights`` also p.

    Raises:
        ValueError: as the reference, or the operator cannot do what was asked.
    """
    if return_weights:
        return reference.depth_attention(
            sources, query, key_norm_weight, eps, recency_bias, return_weights=True
        )
    reference.check_operands(sources, query, key_norm_weight, recency_bias)
    chosen = choose(operator, sources[0].device, sources[0].dtype, recency_bias is not None)
    return read_with(chosen)(sources, query, key_norm_weight, eps, recency_bias)


def choose(
    operator: OperatorName, device: torch.device, dtype: torch.dtype, biased: bool
) -> OperatorName:
    """The operator that ``auto`` stands for, or the forced one.

    Raises:
        ValueError: there is no such operator, or the forced one cannot do it; says why.
    """
    if operator not in get_args(OperatorName):
        raise ValueError(
            f"operator {operator!r}: must be one of {', '.join(get_args(OperatorName))}"
        )
    if operator in ("two-phase", "plain"):
        return operator
    refusal = _fused_refusal(device, dtype, biased)
    if operator == "auto":
        return "two-phase" if refusal else "fused"
    if refusal:
        raise ValueError(f"the fused depth-attention operator {refusal}; use two-phase or auto")
    return operator


def read_with(operator: OperatorName) -> Operator:
    """The function of a name, ``auto`` excluded; operands are not checked again."""
    return {"two-phase": _two_phase, "fused": _fused, "plain": reference.depth_attention}[operator]


def _two_phase(
    sources: Sequence[Tensor],
    query: Tensor,
    key_norm_weight: Tensor,
    eps: float,
    recency_bias: Tensor | float | None,
) -> Tensor:
    """Phase 1 alone: all sources at once, for one query."""
    wide = statistics_dtype(sources[0].dtype)
    directions = (query.to(wide) * key_norm_weight.to(wide)).unsqueeze(0)
    if isinstance(recency_bias, float | int):
        recency_bias = torch.tensor(recency_bias, dtype=wide, device=sources[0].device)
    norms = [inverse_rms(source, eps) for source in sources]
    (attended,), _ = attend_to_summaries(sources, norms, directions, recency_bias)
    return attended.mixed


def _fused(
    sources: Sequence[Tensor],
    query: Tensor,
    key_norm_weight: Tensor,
    eps: float,
    recency_bias: Tensor | float | None,
) -> Tensor:
    from fla.ops.attnres import fused_attnres

    assert recency_bias is None, "chosen for a read with a recency bias"
    return fused_attnres(query, list(sources), key_norm_weight, rms_eps=eps)


def _fused_refusal(device: torch.device, dtype: torch.dtype, biased: bool) -> str | None:
    if device.type != "cuda":
        return f"needs CUDA, the sources are on {device.type}"
    if not _has_fla():
        return "needs fla-core, which is not installed (pip install fla-core)"
    if dtype == torch.float64:
        return "has no float64"
    if biased:
        return "has no recency bias"
    return None


@cache
def _has_fla() -> bool:
    try:
        return find_spec("fla.ops.attnres") is not None
    except ModuleNotFoundError:
        return False
