"""The pipeline plan: which chunk reads and completes which source, and what each hop carries.

Pure arithmetic on integers (no torch), so that commands, tests and every rank can afford it.
Words: a layer has two sublayers, a block is S consecutive sublayers, source 0 is the embedding b_0
and source n the summary b_n of the n-th block. Chunk c runs on pipeline rank c mod P in virtual
stage c div P.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

SUBLAYERS_PER_LAYER = 2


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
        starts_with_partial: whether the chunk starts inside a block and so receives a partial sum.
    """

    index: int
    rank: int
    virtual_stage: int
    layers: range
    available: tuple[int, ...]
    produced: tuple[int, ...]
    starts_with_partial: bool


@dataclass(frozen=True)
class HopPlan:
    """What crosses from chunk ``index`` to chunk ``index + 1`` for one micro-batch, forward.

    The backward direction carries the gradients of the same entries.

    Attributes:
        sources: completed sources on the wire, oldest first.
        partial: whether the partial sum crosses too; it is the last entry then.
    """

    index: int
    sources: tuple[int, ...]
    partial: bool

    @property
    def entries(self) -> int:
        """Whole sources on the wire, the partial sum included."""
        return len(self.sources) + self.partial


@dataclass(frozen=True)
class PipelinePlan:
    """The plan of one layout.

    Attributes:
        layers_per_chunk: layers of every chunk, in model order.
        pipeline_size: P.
        block_size: S in sublayers; None is the baseline, where one residual stream crosses every
            hop and there are no sources.
    """

    layers_per_chunk: tuple[int, ...]
    pipeline_size: int
    block_size: int | None

    @cached_property
    def chunks(self) -> tuple[ChunkPlan, ...]:
        """All chunks in model order."""
        return tuple(self._chunk(index) for index in range(len(self.layers_per_chunk)))

    @cached_property
    def hops(self) -> tuple[HopPlan, ...]:
        """All hops under policy naive: every available source and the partial sum."""
        return tuple(
            HopPlan(chunk.index - 1, chunk.available, chunk.starts_with_partial)
            for chunk in self.chunks[1:]
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

    def _chunk(self, index: int) -> ChunkPlan:
        first_layer = sum(self.layers_per_chunk[:index])
        end_layer = first_layer + self.layers_per_chunk[index]
        start = first_layer * SUBLAYERS_PER_LAYER
        completed_before = self._completed(start) if index else 0
        completed_after = self._completed(end_layer * SUBLAYERS_PER_LAYER)
        return ChunkPlan(
            index=index,
            rank=index % self.pipeline_size,
            virtual_stage=index // self.pipeline_size,
            layers=range(first_layer, end_layer),
            available=tuple(range(completed_before)),
            produced=tuple(range(completed_before, completed_after)),
            starts_with_partial=index > 0 and self._inside_block(start),
        )

    def _completed(self, sublayers: int) -> int:
        """How many sources exist after so many sublayers, b_0 among them."""
        if self.block_size is None:
            return 0
        whole, rest = divmod(sublayers, self.block_size)
        return 1 + whole + (rest > 0 and sublayers == self.num_sublayers)

    def _inside_block(self, sublayer: int) -> bool:
        if self.block_size is None:
            return True
        return sublayer % self.block_size != 0 and sublayer < self.num_sublayers


def even_plan(
    num_layers: int, pipeline_size: int, virtual_size: int, block_size: int | None
) -> PipelinePlan:
    """The plan of equal chunks.

    Raises:
        ValueError: the layers do not divide into P x V chunks.
    """
    num_chunks = pipeline_size * virtual_size
    if num_layers % num_chunks:
        raise ValueError(f"{num_layers} layers do not divide into {num_chunks} equal chunks")
    return PipelinePlan((num_layers // num_chunks,) * num_chunks, pipeline_size, block_size)


def total_entries(hops: Sequence[HopPlan]) -> int:
    """Entries that all hops carry per micro-batch in one direction."""
    return sum(hop.entries for hop in hops)
