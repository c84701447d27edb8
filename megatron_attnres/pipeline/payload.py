"""Packing a depth state into the one tensor per hop that Megatron-Core's schedules carry.

A depth state is here what it is on the wire: completed sources and perhaps a partial sum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_attnres.pipeline.plan import HopPlan


def pack(sources: Sequence[Tensor], partial: Tensor | None, hop: HopPlan) -> Tensor:
    """Stack the hop's entries, each [s, b, h], into [entries, s, b, h]; the partial sum is last.

    Raises:
        RuntimeError: the state is not what the plan says crosses this hop.
    """
    _check(sources, partial, hop)
    entries = [sources[index] for index in hop.sources]
    if partial is not None:
        entries.append(partial)
    return torch.stack(entries)


def unpack(packed: Tensor, hop: HopPlan) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The sources and the partial sum that ``pack`` stacked, as views of it."""
    entries = packed.unbind()
    if hop.partial:
        return entries[:-1], entries[-1]
    return entries, None


def _check(sources: Sequence[Tensor], partial: Tensor | None, hop: HopPlan) -> None:
    if len(sources) != len(hop.sources) or (partial is not None) != hop.partial:
        raise RuntimeError(
            f"hop {hop.index}-{hop.index + 1} carries {len(hop.sources)} sources and "
            f"{'a' if hop.partial else 'no'} partial sum by the plan, the chunk made "
            f"{len(sources)} and {'a' if partial is not None else 'none'}"
        )
