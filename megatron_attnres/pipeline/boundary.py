"""The two edges of a chunk: what enters it and what leaves it, for one micro-batch after another.

A depth state is here what it is on the wire: completed sources and perhaps a partial sum. Sources
enter a chunk on three ways, and each brings its gradients back on the same way:

- packed, through the one tensor per hop that Megatron-Core's schedules carry: by autograd;
- relayed, on the relay lane: the chunk's edge keeps the gradient, the relay lane takes it upstream;
- cached, from an earlier virtual stage of the rank: the gradient is deposited with the rank.
"""

from collections.abc import Iterator, Sequence
from functools import partial as bind
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_attnres.pipeline.cache import BlockCache, CacheKey
from megatron_attnres.pipeline.plan import ChunkPlan, HopPlan, PipelinePlan
from megatron_attnres.pipeline.relay import RelayExchange
from megatron_attnres.pipeline.source_gradients import JoinGradients, KeepGradient, join


class Entered(NamedTuple):
    """The depth state at a chunk's start.

    Attributes:
        sources: all that are complete, oldest first.
        partial: the partial sum of the block that the chunk starts in, or None at its start.
        statistics: of the oldest sources, what the rank's earlier chunks computed of them.
    """

    sources: tuple[Tensor, ...]
    partial: Tensor | None
    statistics: tuple[Tensor, ...]


class ChunkBoundary:
    """Follows one chunk through the micro-batches of a step.

    Args:
        plan: the pipeline plan.
        chunk: this chunk of it.
        cache: of the rank.
        relay: of the rank; None packs relayed entries with the critical ones.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        chunk: ChunkPlan,
        cache: BlockCache,
        relay: RelayExchange | None,
    ) -> None:
        self.hop_in = plan.hops[chunk.index - 1] if chunk.index > 0 else None
        self.hop_out = plan.hops[chunk.index] if chunk.index < len(plan.hops) else None
        self.chunk = chunk
        self._cache = cache
        self._relay = relay
        self._from_cache = plan.from_cache(chunk)
        has_later_chunk = chunk.index + plan.pipeline_size < len(plan.chunks)
        self._is_last_reader = not has_later_chunk
        self._fills_cache = plan.policy == "cached" and has_later_chunk
        self._microbatch = -1

    def begin_step(self) -> None:
        """The next micro-batch is the step's first."""
        self._microbatch = -1

    def enter(self, packed: Tensor | None) -> Entered | None:
        """The state at the chunk's start.

        Args:
            packed: the hop's entries, [entries, s, b, h]; None for the first chunk.

        Returns:
            None for the first chunk.
        """
        self._microbatch += 1
        if self.hop_in is None:
            return None
        sources, partial_sum = unpack(packed, self.hop_in, self._relay is not None)
        relayed = self._receive_relayed()
        self._relay_on(sources | relayed)
        if self._fills_cache:
            for source, tensor in (sources | relayed).items():
                self._cache.put(self._key(source), tensor, self.chunk.index)
        entered = {source: self._join(source, tensor) for source, tensor in sources.items()}
        for source, tensor in relayed.items():
            keep = bind(self._keep_relayed, self._microbatch, source)
            entered[source] = KeepGradient.apply(packed, tensor, keep)
        statistics = [self._cache.noted(self._key(source)) for source in self._from_cache]
        for source in self._from_cache:
            key = self._key(source)
            tensor = self._cache.read(key, self.chunk.index, last=self._is_last_reader)
            entered[source] = KeepGradient.apply(packed, tensor, bind(self._cache.deposit, key))
        return Entered(
            tuple(entered[source] for source in self.chunk.available),
            partial_sum,
            tuple(takewhile(lambda statistic: statistic is not None, statistics)),
        )

    def leave(
        self,
        sources: Sequence[Tensor],
        partial_sum: Tensor | None,
        statistics: Sequence[Tensor] = (),
    ) -> Tensor:
        """Pack what the next hop carries.

        Args:
            sources: all sources complete at the chunk's end, oldest first.
            partial_sum: of the block that the chunk ends in.
            statistics: what the chunk knows of the oldest sources, for the rank's later chunks.

        Raises:
            RuntimeError: the state is not what the plan says.
        """
        complete = {*self.chunk.available, *self.chunk.produced}
        if len(sources) != len(complete) or (partial_sum is not None) != self.hop_out.partial:
            raise RuntimeError(
                f"chunk {self.chunk.index} ends with {len(sources)} sources and "
                f"{'a' if partial_sum is not None else 'no'} partial sum; the plan says "
                f"{len(complete)} and {'a' if self.hop_out.partial else 'none'}"
            )
        leaving = list(sources)
        if self._fills_cache:
            for source in self.chunk.produced:
                self._cache.put(self._key(source), sources[source], self.chunk.index)
                leaving[source] = self._join(source, sources[source])
            for source, statistic in enumerate(statistics):
                self._cache.note(self._key(source), statistic)
        return pack(leaving, partial_sum, self.hop_out, self._relay is not None)

    def _receive_relayed(self) -> dict[int, Tensor]:
        if self._relay is None:
            return {}
        relayed = self._relay.entries("forward", self.hop_in.index, self._microbatch)
        self._relay.forget("forward", self.hop_in.index, self._microbatch)
        return relayed

    def _relay_on(self, arrived: dict[int, Tensor]) -> None:
        """Send on what the next chunk lacks, before this chunk computes."""
        if self._relay is not None and self.hop_out is not None:
            self._relay.send_forward(self.hop_out.index, self._microbatch, arrived)

    def _join(self, source: int, tensor: Tensor) -> Tensor:
        """Let others' gradients of a source join those that flow through ``tensor``."""
        if not self._fills_cache and not self._is_relayed_on(source):
            return tensor
        return JoinGradients.apply(tensor, bind(self._others, self._microbatch, source))

    def _keep_relayed(self, microbatch: int, source: int, gradient: Tensor) -> None:
        """The gradient of a source that came over the relay lane, complete, for the way back."""
        whole = join(gradient, self._others(microbatch, source))
        self._relay.keep_gradient(self.hop_in.index, microbatch, source, whole)

    def _others(self, microbatch: int, source: int) -> Iterator[Tensor | None]:
        """Gradients of a source from later virtual stages and, if relayed, from downstream."""
        if self._fills_cache:
            yield self._cache.collect(CacheKey(microbatch, source))
        if self._is_relayed_on(source):
            yield self._relay.gradient(self.hop_out.index, microbatch, source)

    def _is_relayed_on(self, source: int) -> bool:
        return (
            self._relay is not None and self.hop_out is not None and source in self.hop_out.relayed
        )

    def _key(self, source: int) -> CacheKey:
        return CacheKey(self._microbatch, source)


def packed_sources(hop: HopPlan, early_relay: bool) -> tuple[int, ...]:
    """The sources that travel in the schedule's tensor; the others have the relay lane."""
    return hop.critical if early_relay else hop.sources


def pack(
    sources: Sequence[Tensor], partial_sum: Tensor | None, hop: HopPlan, early_relay: bool
) -> Tensor:
    """Stack a hop's entries, each [s, b, h], into [entries, s, b, h]; the partial sum is last."""
    entries = [sources[index] for index in packed_sources(hop, early_relay)]
    if partial_sum is not None:
        entries.append(partial_sum)
    return torch.stack(entries)


def unpack(
    packed: Tensor, hop: HopPlan, early_relay: bool
) -> tuple[dict[int, Tensor], Tensor | None]:
    """The sources, by index, and the partial sum that ``pack`` stacked, as views of it."""
    entries = packed.unbind()
    partial_sum = entries[-1] if hop.partial else None
    sources = dict(zip(packed_sources(hop, early_relay), entries, strict=False))
    return sources, partial_sum
