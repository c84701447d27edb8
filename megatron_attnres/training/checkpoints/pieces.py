"""Which pieces of the whole model's state a rank holds, under names that no layout changes.

Three whole tensors for each parameter, by its global name: ``master.NAME`` (the float32 weight; the
model's own parameters are its rounding), ``exp_avg.NAME`` and ``exp_avg_sq.NAME``.
"""

from collections.abc import Iterator, Sequence

from megatron_attnres.optimizer.gradient_norm import counts_in_norm
from megatron_attnres.optimizer.training_optimizer import StateSlice, TrainingOptimizer
from megatron_attnres.parallel.groups import ParallelGroups
from megatron_attnres.parallel.parameters import sharding_of
from megatron_attnres.pipeline.chunk import PipelineChunk
from megatron_attnres.training.checkpoints.boxes import Slicing, boxes_of
from megatron_attnres.training.checkpoints.plans import Piece


class StatePieces:
    """The state of one rank's parameters.

    Args:
        chunks: of this rank.
        optimizer: of this rank.
        groups: process groups.
    """

    def __init__(
        self,
        chunks: Sequence[PipelineChunk],
        optimizer: TrainingOptimizer,
        groups: ParallelGroups,
    ) -> None:
        self._names = {
            parameter: chunk.module.global_name(name)
            for chunk in chunks
            for name, parameter in chunk.module.named_parameters()
        }
        self._optimizer = optimizer
        self._groups = groups

    def to_write(self) -> list[Piece]:
        """Every number of the whole model is in one rank's pieces, once.

        Of tensor-parallel replicas and tied copies, the one writes that counts in the norm.
        """
        return [
            piece
            for held in self._optimizer.state_slices()
            if counts_in_norm(held.parameter, self._groups.tensor_rank)
            for piece in self._pieces(held, *self._share(held))
        ]

    def to_read(self) -> list[Piece]:
        """All that this rank holds."""
        return [
            piece
            for held in self._optimizer.state_slices()
            for piece in self._pieces(held, held.start, held.stop)
        ]

    def _share(self, held: StateSlice) -> tuple[int, int]:
        """Replicas share the writing."""
        length = held.stop - held.start
        share = self._groups.data_rank if held.replicas > 1 else 0
        first, last = (length * one // held.replicas for one in (share, share + 1))
        return held.start + first, held.start + last

    def _pieces(self, held: StateSlice, start: int, stop: int) -> Iterator[Piece]:
        parameter = held.parameter
        slicing = Slicing(
            tuple(parameter.shape),
            sharding_of(parameter),
            self._groups.tensor_rank,
            self._groups.layout.tensor,
        )
        for box in boxes_of(slicing, start, stop):
            for kind, flat in held.tensors.items():
                tensor = flat[start - held.start : stop - held.start].as_strided(
                    box.sizes,
                    box.strides,
                    flat.storage_offset() + start - held.start + box.start,
                )
                name = f"{kind}.{self._names[parameter]}"
                yield Piece(name, slicing.whole_shape, box.offsets, tensor)
