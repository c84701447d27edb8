"""One step over Megatron-Core's own schedules: forward and backward of all micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_attnres.pipeline.cache import BlockCache
from megatron_attnres.pipeline.chunk import PipelineChunk
from megatron_attnres.pipeline.communicator import AttnResP2PCommunicator
from megatron_attnres.pipeline.waiting import WaitClock
from megatron_attnres.pipeline.wire import Traffic

ForwardStep = Callable[[Iterator[Any], PipelineChunk], tuple[Any, Callable[..., Any]]]


@dataclass(frozen=True)
class StepRecord:
    """What one step leaves.

    Attributes:
        losses: what the loss function reduced of every micro-batch; empty off the last stage.
        traffic: bytes that this rank sent.
        peak_cached_entries: most sources that this rank's cache held at once.
        wait_seconds: that this rank stood still for transfers.
    """

    losses: list[dict[str, Any]]
    traffic: Traffic
    peak_cached_entries: int
    wait_seconds: float


@dataclass(frozen=True)
class PipelineStep:
    """Runs the schedule that fits the layout.

    Attributes:
        chunks: this rank's chunks, by virtual stage.
        communicator: None where the pipeline has a single stage.
        cache: of this rank.
        groups: process groups.
        seq_length: s; the communicator's sizes come from the plan, Megatron-Core still asks.
        micro_batch_size: b.
    """

    chunks: Sequence[PipelineChunk]
    communicator: AttnResP2PCommunicator | None
    cache: BlockCache
    groups: ProcessGroupCollection
    seq_length: int
    micro_batch_size: int

    def run(
        self,
        forward_step: ForwardStep,
        data_iterators: Sequence[Iterator[Any]],
        num_microbatches: int,
        forward_only: bool = False,
        samples: Sequence[Sequence[int]] = (),
    ) -> StepRecord:
        """Forward (and backward) of every micro-batch.

        Args:
            forward_step: Megatron-Core's: takes a chunk's data iterator and the chunk, returns
                its output and the function that makes a loss of it.
            data_iterators: one per chunk.
            num_microbatches: M.
            forward_only: skip the backward, for validation.
            samples: of each of this rank's micro-batches, by their place in the data order: what
                dropout depends on. Nothing is dropped without them, as in validation.

        Raises:
            PipelineTransferError: a neighbour was lost.
            RuntimeError: cache, deposits or a lane are not empty at the end; names the entry.
        """
        schedule = schedules.get_forward_backward_func(
            pp_size=self.groups.pp.size(), vp_size=self._virtual_size
        )
        self._begin(num_microbatches, forward_only, samples)
        losses = schedule(
            forward_step_func=forward_step,
            data_iterator=list(data_iterators),
            model=list(self.chunks),
            num_microbatches=num_microbatches,
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            forward_only=forward_only,
            p2p_communicator=self.communicator,
            pg_collection=self.groups,
        )
        return StepRecord(losses, self._end(), self.cache.peak_entries, self._waited())

    def resized(self, seq_length: int, micro_batch_size: int) -> Self:
        """The step for micro-batches of another shape; it takes the place of this one.

        All ranks must do it between the same two steps.

        Args:
            seq_length: s, at most the model's and a multiple of TP under sequence parallelism.
            micro_batch_size: b.
        """
        if self.communicator is not None:
            config = self.chunks[0].config
            shards = self.groups.tp.size() if config.sequence_parallel else 1
            self.communicator.resize((seq_length // shards, micro_batch_size, config.hidden_size))
        return replace(self, seq_length=seq_length, micro_batch_size=micro_batch_size)

    def _begin(
        self, num_microbatches: int, forward_only: bool, samples: Sequence[Sequence[int]]
    ) -> None:
        self.cache.begin_step()
        for chunk in self.chunks:
            chunk.begin_step(samples)
        if self.communicator is not None:
            self.communicator.begin_step(self._table(num_microbatches), forward_only)

    def _end(self) -> Traffic:
        traffic = self.communicator.end_step() if self.communicator is not None else Traffic()
        self.cache.check_empty()
        return traffic

    @property
    def waits(self) -> WaitClock | None:
        """How long this rank stood still for transfers; None where it has none."""
        return self.communicator.waits if self.communicator is not None else None

    def _waited(self) -> float:
        return self.waits.take_seconds() if self.waits is not None else 0.0

    @property
    def _virtual_size(self) -> int | None:
        return len(self.chunks) if len(self.chunks) > 1 else None

    def _table(self, num_microbatches: int) -> list[tuple[int, int]]:
        return schedules.get_schedule_table(
            num_microbatches,
            len(self.chunks),
            self.chunks[0].config.microbatch_group_size_per_vp_stage or num_microbatches,
        )
