"""The profiler of a run: records steps on every rank and brings them together on rank 0."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

from megatron_attnres.pipeline.profiler.alignment import AlignedClock, ClockReading, read_clocks
from megatron_attnres.pipeline.profiler.clocks import clock_of
from megatron_attnres.pipeline.profiler.recorder import StepRecorder
from megatron_attnres.pipeline.profiler.records import RankStep, join_ranks
from megatron_attnres.pipeline.step import PipelineStep
from megatron_attnres.pipeline.timeline.records import StepTimeline, TimelineLayout, Timelines


class PipelineProfiler:
    """Records single steps. Making one is collective over all ranks, as are ``begin`` and ``end``.

    Args:
        step: to be watched; its pipeline has at least two stages.
        layout: of the run, for the result.
        device: on which the step runs.
        timeout: of the profiler's own messages.
    """

    def __init__(
        self,
        step: PipelineStep,
        layout: TimelineLayout,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self._step = step
        self._layout = layout
        pipeline = step.groups.pp
        self._pipeline = distributed.get_global_rank(pipeline, 0)
        self._recorder = StepRecorder(clock_of(device), pipeline.rank())
        # Clocks and records travel through the host's memory, whatever the run's backend.
        self._group = distributed.new_group(
            backend="gloo", timeout=timeout, group_desc="pipeline profiler"
        )
        # Of its own: TORCH_DISTRIBUTED_DEBUG=DETAIL refuses collectives in a group in which some
        # ranks have sent more messages than others.
        self._clock_group = distributed.new_group(
            backend="gloo", timeout=timeout, group_desc="pipeline profiler's clocks"
        )
        self._first_reading: ClockReading | None = None
        self._steps: list[RankStep] = []

    def begin(self) -> None:
        """Compare clocks before the first step that is recorded. Collective."""
        self._steps = []
        self._first_reading = read_clocks(self._clock_group)

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Record the step that runs inside."""
        self._recorder.attach(self._step.chunks, self._step.communicator)
        yield
        self._steps.append(self._recorder.detach(iteration, distributed.get_rank(), self._pipeline))

    def end(self) -> Timelines | None:
        """Compare clocks again and join what all ranks recorded. Collective.

        Returns:
            On rank 0 the timelines; None elsewhere.
        """
        clock = AlignedClock(self._first_reading, read_clocks(self._clock_group))
        own = clock.error, [step.on_clock(clock) for step in self._steps]
        everyone = [None] * distributed.get_world_size() if distributed.get_rank() == 0 else None
        distributed.gather_object(own, everyone, dst=0, group=self._group)
        if everyone is None:
            return None
        # Two ranks may be off in opposite directions.
        error = 2 * max(error for error, _ in everyone)
        return Timelines(
            self._layout, _timelines([step for _, steps in everyone for step in steps]), error
        )


def _timelines(steps: Sequence[RankStep]) -> list[StepTimeline]:
    by_pipeline: dict[tuple[int, int], list[RankStep]] = defaultdict(list)
    for step in steps:
        by_pipeline[step.iteration, step.pipeline].append(step)
    return [join_ranks(by_pipeline[key]) for key in sorted(by_pipeline)]
