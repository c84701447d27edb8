"""The pipeline plan: which chunk reads and completes which source, and what each hop carries.

Pure arithmetic on integers (no torch), so that commands, tests and every rank can afford it.
Words: a layer has two sublayers, a block is S consecutive sublayers, source 0 is the embedding b_0
and source n the summary b_n of the n-th block. Chunk c runs on pipeline rank c mod P in virtual
stage c div P. Every chunk reads every source that is complete when it starts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

SUBLAYERS_PER_LAYER = 2

Policy = Literal["naive", "cached"]


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk: the layers that a pipeline rank runs in one virtual stage.

    Attributes:
        index: c.
        rank: pipeline rank.
        virtual_stage: v.
        layers: global indices of its layers.
        available: sources complete when the chunk starts.
        produced: sources completed inside the chunk; b_0 in chunk 0.
        held: those of ``available`` that the rank received or produced in an earlier virtual stage.
        starts_with_partial: whether the chunk starts inside a block and so receives a partial sum.
    """

    index: int
    rank: int
    virtual_stage: int
    layers: range
    available: tuple[int, ...]
    produced: tuple[int, ...]
    held: tuple[int, ...]
    starts_with_partial: bool


@dataclass(frozen=True)
class HopPlan:
    """What crosses from chunk ``index`` to chunk ``index + 1`` for one micro-batch, forward.

    The backward direction carries the gradients of the same entries.

    Attributes:
        relayed: sources that the sending chunk had received itself, oldest first; they can go on
            while it computes.
        critical: sources that the sending chunk completes; newer than all relayed ones.
        partial: whether the partial sum crosses too; critical as well.
    """

    index: int
    relayed: tuple[int, ...]
    critical: tuple[int, ...]
    partial: bool

    @property
    def sources(self) -> tuple[int, ...]:
        """All completed sources that cross, oldest first."""
        return self.relayed + self.critical

    @property
    def critical_entries(self) -> int:
        """Entries that exist only when the sending chunk has finished."""
        return len(self.critical) + self.partial

    @property
    def entries(self) -> int:
        """Whole sources that cross, the partial sum included."""
        return len(self.sources) + self.partial


@dataclass(frozen=True)
class PipelinePlan:
    """The plan of one layout.

    Attributes:
        layers_per_chunk: layers of every chunk, in model order. The first chunk may have none
            (embedding only) and the last (head only).
        pipeline_size: P.
        block_size: S in sublayers; None is the baseline, where one residual stream crosses every
            hop and there are no sources.
        policy: ``naive`` hops carry every available source; ``cached`` hops only those that the
            receiving rank does not hold.
    """

    layers_per_chunk: tuple[int, ...]
    pipeline_size: int
    block_size: int | None
    policy: Policy = "cached"

    def __post_init__(self) -> None:
        if len(self.layers_per_chunk) % self.pipeline_size:
            raise ValueError(
                f"{len(self.layers_per_chunk)} chunks do not divide over {self.pipeline_size} ranks"
            )
        if any(layers == 0 for layers in self.layers_per_chunk[1:-1]):
            raise ValueError(
                f"layers per chunk {self.layers_per_chunk}: only the first chunk (embedding) and "
                "the last (head) may have none"
            )

    @cached_property
    def chunks(self) -> tuple[ChunkPlan, ...]:
        """All chunks in model order."""
        return tuple(self._chunk(index) for index in range(len(self.layers_per_chunk)))

    @cached_property
    def hops(self) -> tuple[HopPlan, ...]:
        """All hops in model order."""
        return tuple(
            self._hop(sender, receiver)
            for sender, receiver in zip(self.chunks, self.chunks[1:], strict=False)
        )

    @property
    def virtual_size(self) -> int:
        """V."""
        return len(self.layers_per_chunk) // self.pipeline_size

    @property
    def num_sublayers(self) -> int:
        """L."""
        return SUBLAYERS_PER_LAYER * sum(self.layers_per_chunk)

    def ends_block(self, sublayer: int) -> bool:
        """Whether a block is complete after this sublayer; the model's last block may be short."""
        if self.block_size is None:
            return False
        return (sublayer + 1) % self.block_size == 0 or sublayer + 1 == self.num_sublayers

    def chunks_of_rank(self, rank: int) -> tuple[ChunkPlan, ...]:
        """The chunks that one pipeline rank runs, by virtual stage."""
        return self.chunks[rank :: self.pipeline_size]

    def from_cache(self, chunk: ChunkPlan) -> tuple[int, ...]:
        """Sources that a chunk reads from its rank's cache instead of from the hop before it."""
        return chunk.held if self.policy == "cached" else ()

    def _chunk(self, index: int) -> ChunkPlan:
        first_layer = sum(self.layers_per_chunk[:index])
        start = first_layer * SUBLAYERS_PER_LAYER
        earlier = index - self.pipeline_size
        return ChunkPlan(
            index=index,
            rank=index % self.pipeline_size,
            virtual_stage=index // self.pipeline_size,
            layers=range(first_layer, first_layer + self.layers_per_chunk[index]),
            available=tuple(range(self._completed_before(index))),
            produced=tuple(range(self._completed_before(index), self._completed_before(index + 1))),
            # After its earlier chunk the rank holds all that was complete when that chunk ended.
            held=tuple(range(self._completed_before(earlier + 1))) if earlier >= 0 else (),
            starts_with_partial=index > 0 and self._inside_block(start),
        )

    def _hop(self, sender: ChunkPlan, receiver: ChunkPlan) -> HopPlan:
        present = set(self.from_cache(receiver))
        crossing = [source for source in receiver.available if source not in present]
        return HopPlan(
            sender.index,
            relayed=tuple(source for source in crossing if source not in sender.produced),
            critical=tuple(source for source in crossing if source in sender.produced),
            partial=receiver.starts_with_partial,
        )

    def _completed_before(self, index: int) -> int:
        """How many sources exist before a chunk, b_0 among them; none before the first chunk."""
        if self.block_size is None or index == 0:
            return 0
        sublayers = SUBLAYERS_PER_LAYER * sum(self.layers_per_chunk[:index])
        whole, rest = divmod(sublayers, self.block_size)
        return 1 + whole + (rest > 0 and sublayers == self.num_sublayers)

    def _inside_block(self, sublayer: int) -> bool:
        if self.block_size is None:
            return True
        return sublayer % self.block_size != 0 and sublayer < self.num_sublayers


def even_layers(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Layers of equal chunks.

    Raises:
        ValueError: the layers do not divide.
    """
    if num_layers % num_chunks:
        raise ValueError(f"{num_layers} layers do not divide into {num_chunks} equal chunks")
    return (num_layers // num_chunks,) * num_chunks


def total_entries(hops: Iterable[HopPlan]) -> int:
    """Entries that all hops carry per micro-batch in one direction."""
    return sum(hop.entries for hop in hops)


def least_entries(plan: PipelinePlan) -> int:
    """The fewest entries that any protocol on this ring can send per micro-batch, forward.

    Every source must reach every other rank that reads it, and every partial sum the next chunk.
    """
    sources = sum(
        len({reader.rank for reader in plan.chunks[chunk.index + 1 :]} - {chunk.rank})
        for chunk in plan.chunks
        for _ in chunk.produced
    )
    return sources + sum(hop.partial for hop in plan.hops)


def paper_counts(num_blocks: int, pipeline_size: int, virtual_size: int) -> tuple[float, float]:
    """Equations 7 (naive) and 8 (cached) of the paper, in entries; without b_0 and partial sums."""
    chunks = pipeline_size * virtual_size
    per_chunk = num_blocks / chunks
    naive = chunks * (chunks - 1) / 2 * per_chunk
    first_round = pipeline_size * (pipeline_size - 1) / 2
    return naive, (first_round + (virtual_size - 1) * pipeline_size**2) * per_chunk


def largest_hop(hops: Sequence[HopPlan]) -> int:
    """Entries of the fullest hop; 0 without hops."""
    return max((hop.entries for hop in hops), default=0)
