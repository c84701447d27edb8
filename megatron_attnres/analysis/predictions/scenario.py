"""A described step: layout, compute times, cluster. Plain data, no torch."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_attnres.analysis.predictions.assumptions import Assumptions
from megatron_attnres.analysis.predictions.compute_times import LayerTimes, MeasuredTimes
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.pipeline.plan import even_layers
from megatron_attnres.pipeline.simulator.network import Network


@dataclass(frozen=True)
class Scenario:
    """All that predictions of a step need.

    Attributes:
        layout: parallel sizes.
        num_layers: of the model.
        block_size: S of block mode, in sublayers.
        num_microbatches: M of one pipeline's step.
        microbatch_group_size: contiguous micro-batches of one virtual stage.
        overlap_p2p: post receives ahead of compute (V > 1).
        times: compute times.
        entry_bytes: of one entry.
        network: links between the stages.
        tokens_per_microbatch: of one pipeline; None where unknown.
        assumptions: what all this rests on.
    """

    layout: ParallelLayout
    num_layers: int
    block_size: int
    num_microbatches: int
    microbatch_group_size: int
    overlap_p2p: bool
    times: LayerTimes | MeasuredTimes
    entry_bytes: int
    network: Network
    tokens_per_microbatch: int | None
    assumptions: Assumptions

    @property
    def layers_per_chunk(self) -> tuple[int, ...]:
        """Layers of every chunk, in model order."""
        given = self.layout.layers_per_chunk
        return given or even_layers(self.num_layers, self.layout.num_chunks)

    @property
    def num_sublayers(self) -> int:
        """L."""
        return 2 * self.num_layers

    @property
    def num_blocks(self) -> int:
        """N of block mode."""
        return blocks_of(self.num_sublayers, self.block_size)

    @property
    def tokens_per_step(self) -> int | None:
        """Over all data-parallel pipelines; None where unknown."""
        if self.tokens_per_microbatch is None:
            return None
        return self.tokens_per_microbatch * self.num_microbatches * self.layout.data

    def with_virtual_size(self, virtual_size: int) -> "Scenario":
        """The same with V equal chunks per stage."""
        layout = replace(self.layout, virtual_pipeline=virtual_size, layers_per_chunk=None)
        return replace(self, layout=layout)

    def as_json(self) -> dict[str, Any]:
        """Layout and assumptions for programs."""
        return {
            "layout": asdict(self.layout)
            | {
                "world_size": self.layout.world_size,
                "layers_per_chunk": self.layers_per_chunk,
                "num_blocks": self.num_blocks,
                "block_size": self.block_size,
                "num_microbatches": self.num_microbatches,
            },
            "assumptions": self.assumptions.as_json(),
        }

    def __str__(self) -> str:
        layout = self.layout
        return (
            f"{layout.world_size:,} ranks (TP {layout.tensor}, P {layout.pipeline}, "
            f"V {layout.virtual_pipeline}, DP {layout.data}), {self.num_layers} layers in "
            f"{self.num_blocks} blocks of {self.block_size} sublayers, "
            f"{self.num_microbatches} micro-batches"
        )


def blocks_of(num_sublayers: int, block_size: int) -> int:
    """N: how many blocks the sublayers make; the last may be short."""
    return -(-num_sublayers // block_size)
