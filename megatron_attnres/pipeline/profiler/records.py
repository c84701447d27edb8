"""What one rank measured of a step, and how the ranks of a pipeline make a timeline of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_attnres.pipeline.messages import LaneKind, Message
from megatron_attnres.pipeline.timeline.records import (
    ComputeSpan,
    StageSpan,
    StepTimeline,
    TransferSpan,
    WaitSpan,
    stage_of,
)

LaneMessage = tuple[Message, LaneKind]


class Received(NamedTuple):
    """The receiver's side of a transfer: seconds, and payload bytes."""

    posted: float
    completed: float
    num_bytes: int


@dataclass(frozen=True)
class RankStep:
    """One rank's part of a step. Seconds on the rank's own clock, or on a common one.

    Attributes:
        iteration: of the run.
        rank: global.
        pipeline: global rank of the pipeline's first stage.
        stage: pipeline rank.
        span: the schedule's beginning and the end of the step's last send.
        computes, waits: in the order in which they happened.
        sent: when each message was handed over.
        received: of each message.
    """

    iteration: int
    rank: int
    pipeline: int
    stage: int
    span: StageSpan
    computes: tuple[ComputeSpan, ...]
    waits: tuple[WaitSpan, ...]
    sent: dict[LaneMessage, float]
    received: dict[LaneMessage, Received]

    def on_clock(self, clock: Callable[[float], float]) -> "RankStep":
        """The same with every time translated."""

        def moved(span: NamedTuple) -> NamedTuple:
            return span._replace(start=clock(span.start), end=clock(span.end))

        return RankStep(
            self.iteration,
            self.rank,
            self.pipeline,
            self.stage,
            moved(self.span),
            tuple(map(moved, self.computes)),
            tuple(map(moved, self.waits)),
            {message: clock(time) for message, time in self.sent.items()},
            {
                message: Received(clock(posted), clock(completed), num_bytes)
                for message, (posted, completed, num_bytes) in self.received.items()
            },
        )


def join_ranks(steps: Sequence[RankStep]) -> StepTimeline:
    """The timeline of one pipeline's step from all its stages' records on a common clock.

    A transfer has started when both ends had posted it and the message before it on its lane had
    arrived.

    Raises:
        ValueError: a message that one end knows and the other does not, or a stage that is missing.
    """
    steps = sorted(steps, key=lambda step: step.stage)
    if [step.stage for step in steps] != list(range(len(steps))):
        raise ValueError(f"stages {[step.stage for step in steps]} are not those of a pipeline")
    origin = min(step.span.start for step in steps)
    steps = [step.on_clock(lambda time: time - origin) for step in steps]
    return StepTimeline(
        iteration=steps[0].iteration,
        ranks=tuple(step.rank for step in steps),
        stages=tuple(step.span for step in steps),
        computes=tuple(span for step in steps for span in step.computes),
        waits=tuple(span for step in steps for span in step.waits),
        transfers=_transfers(steps),
    )


def _transfers(steps: Sequence[RankStep]) -> tuple[TransferSpan, ...]:
    sent = {message: time for step in steps for message, time in step.sent.items()}
    received = {message: times for step in steps for message, times in step.received.items()}
    for message, kind in sent.keys() ^ received.keys():
        side = "sent" if (message, kind) in sent else "received"
        raise ValueError(f"{message}, {kind} lane, was {side} only")
    transfers = []
    free_from: dict[tuple[int, str, LaneKind], float] = {}
    # Messages of a lane complete in the order in which they were posted.
    for (message, kind), times in sorted(received.items(), key=lambda item: item[1].completed):
        lane = stage_of(message, "send", len(steps)), message.direction, kind
        posted = sent[message, kind]
        ready = max(posted, times.posted, free_from.get(lane, posted))
        # Clocks agree to some microseconds only; nothing starts after its end.
        started = min(ready, times.completed)
        free_from[lane] = times.completed
        transfers.append(
            TransferSpan(
                message, kind, times.num_bytes, posted, times.posted, started, times.completed
            )
        )
    return tuple(transfers)
