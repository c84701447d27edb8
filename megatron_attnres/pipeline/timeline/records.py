"""What a step of one pipeline did and when, as plain data. No torch.

The profiler measures a timeline, the simulator predicts one; tables, traces and pictures do not
ask which. Times are seconds on one clock for all stages, from the step's start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_attnres.pipeline.messages import Direction, LaneKind, Message, Side
from megatron_attnres.pipeline.plan import PipelinePlan, Policy


class ComputeSpan(NamedTuple):
    """One stage's forward or backward of one chunk for one micro-batch.

    Waits for relayed entries may lie inside.

    Attributes:
        stage: pipeline rank.
        direction: forward or backward.
        chunk: c.
        microbatch: index within the step.
        start, end: seconds.
    """

    stage: int
    direction: Direction
    chunk: int
    microbatch: int
    start: float
    end: float


class WaitSpan(NamedTuple):
    """A stage standing still for a transfer.

    Attributes:
        stage: pipeline rank that waits.
        side: whether it waits as the transfer's sender or as its receiver.
        message: what crosses.
        kind: of the lane.
        start, end: seconds.
    """

    stage: int
    side: Side
    message: Message
    kind: LaneKind
    start: float
    end: float


class TransferSpan(NamedTuple):
    """One message on one lane.

    Attributes:
        message: what crosses.
        kind: of the lane.
        num_bytes: payload.
        send_posted, receive_posted: when each end handed it over, seconds.
        started: both ends had posted it and the lane was free.
        completed: all of it had arrived.
    """

    message: Message
    kind: LaneKind
    num_bytes: int
    send_posted: float
    receive_posted: float
    started: float
    completed: float


class StageSpan(NamedTuple):
    """A stage's own step.

    Attributes:
        start: its schedule began.
        end: its schedule had ended and its sends were complete.
    """

    start: float
    end: float


@dataclass(frozen=True)
class StepTimeline:
    """One step of one pipeline.

    Attributes:
        iteration: of the run, from 1; 0 where there is no run.
        ranks: global ranks, by stage.
        stages: each stage's own step, by stage.
        computes, waits, transfers: what they did, in any order.
    """

    iteration: int
    ranks: tuple[int, ...]
    stages: tuple[StageSpan, ...]
    computes: tuple[ComputeSpan, ...]
    waits: tuple[WaitSpan, ...]
    transfers: tuple[TransferSpan, ...]

    @property
    def start(self) -> float:
        """When the first stage began."""
        return min(stage.start for stage in self.stages)

    @property
    def end(self) -> float:
        """When the last stage ended."""
        return max(stage.end for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Step time: from the first stage's start to the last one's end."""
        return self.end - self.start


@dataclass(frozen=True)
class TimelineLayout:
    """The layout and schedule that timelines belong to.

    Attributes:
        layers_per_chunk: as in the plan.
        pipeline_size: P.
        block_size: S in sublayers; None for standard residuals.
        policy: what hops carry.
        early_relay: whether relayed entries have lanes of their own.
        num_microbatches: M of one pipeline.
        microbatch_group_size: contiguous micro-batches of one virtual stage.
        overlap_p2p: whether receives are posted ahead of compute.
        entry_bytes: of one entry.
    """

    layers_per_chunk: tuple[int, ...]
    pipeline_size: int
    block_size: int | None
    policy: Policy
    early_relay: bool
    num_microbatches: int
    microbatch_group_size: int
    overlap_p2p: bool
    entry_bytes: int

    @property
    def plan(self) -> PipelinePlan:
        """The pipeline plan.

        Raises:
            ValueError: chunks that do not divide over the stages, or empty ones inside.
        """
        return PipelinePlan(self.layers_per_chunk, self.pipeline_size, self.block_size, self.policy)


@dataclass(frozen=True)
class Timelines:
    """Steps of one layout: of several iterations and data- or tensor-parallel pipelines.

    Attributes:
        layout: of all of them.
        steps: by iteration, then by pipeline.
        clock_error: seconds by which the clocks of two ranks may still differ; 0 for a simulation.
    """

    layout: TimelineLayout
    steps: Sequence[StepTimeline]
    clock_error: float = 0.0


def stage_of(message: Message, side: Side, pipeline_size: int) -> int:
    """The stage that sends or receives a message."""
    downstream = (message.direction == "forward") == (side == "receive")
    return (message.hop + downstream) % pipeline_size
