"""Where the time of a step went: the parts of every stage's time, and totals per hop and lane."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

from megatron_attnres.pipeline.messages import Direction, LaneKind
from megatron_attnres.pipeline.timeline.records import (
    ComputeSpan,
    StageSpan,
    StepTimeline,
    TransferSpan,
    WaitSpan,
)
from megatron_attnres.pipeline.timeline.waits import CutWait, cut_waits, span_name

# Times that are equal but for rounding differ by no more than this, in seconds.
SLACK = 1e-9


@dataclass(frozen=True)
class StageParts:
    """What a stage did with the time from the first stage's start to the last one's end.

    The parts add up to ``seconds``.

    Attributes:
        stage: pipeline rank.
        rank: global rank.
        compute: forwards and backwards without the waits inside them, seconds.
        bubble: waits while the other end had not posted the transfer, seconds.
        exposed: the rest of the waits, while the transfer was under way or queued, seconds.
        host: its own step's time that is neither compute nor a wait, seconds.
        idle: before its own step began and after it ended, seconds.
        seconds: step time of the whole pipeline.
    """

    stage: int
    rank: int
    compute: float
    bubble: float
    exposed: float
    host: float
    idle: float
    seconds: float


@dataclass(frozen=True)
class HopTotals:
    """What crossed one hop in one direction on one kind of lane in a step.

    Attributes:
        hop: between chunk ``hop`` and chunk ``hop + 1``.
        direction: forward or backward.
        kind: of the lane.
        messages: how many crossed.
        num_bytes: payload of all of them.
        transfer_seconds: from start to completion, summed.
        exposed_seconds: how long both ends stood still while these transfers were under way or
            queued.
    """

    hop: int
    direction: Direction
    kind: LaneKind
    messages: int
    num_bytes: int
    transfer_seconds: float
    exposed_seconds: float

    @property
    def bytes_per_second(self) -> float | None:
        """Achieved rate while transferring; None if the transfers took no time."""
        return self.num_bytes / self.transfer_seconds if self.transfer_seconds > 0 else None


def stage_parts(timeline: StepTimeline, pipeline_size: int) -> tuple[StageParts, ...]:
    """The parts of every stage's time.

    Raises:
        ValueError: a span that lies outside its stage's own step, overlaps another one of the
            stage or crosses a compute span's edge; whatever ``cut_waits`` refuses.
    """
    computes: dict[int, list[ComputeSpan]] = defaultdict(list)
    for span in timeline.computes:
        computes[span.stage].append(span)
    cuts: dict[int, list[CutWait]] = defaultdict(list)
    for cut in cut_waits(timeline, pipeline_size):
        cuts[cut.wait.stage].append(cut)
    return tuple(
        _parts_of_stage(timeline, stage, computes[stage], cuts[stage])
        for stage in range(pipeline_size)
    )


def hop_totals(timeline: StepTimeline, pipeline_size: int) -> tuple[HopTotals, ...]:
    """Totals by hop, then direction (forward first), then kind (critical first).

    Raises:
        ValueError: whatever ``cut_waits`` refuses.
    """
    transfers: dict[tuple[int, Direction, LaneKind], list[TransferSpan]] = defaultdict(list)
    for transfer in timeline.transfers:
        transfers[_hop_lane(transfer)].append(transfer)
    exposed: dict[tuple[int, Direction, LaneKind], float] = defaultdict(float)
    for cut in cut_waits(timeline, pipeline_size):
        exposed[_hop_lane(cut.wait)] += cut.exposed
    return tuple(
        HopTotals(
            *lane,
            messages=len(transfers[lane]),
            num_bytes=sum(transfer.num_bytes for transfer in transfers[lane]),
            transfer_seconds=sum(span.completed - span.started for span in transfers[lane]),
            exposed_seconds=exposed[lane],
        )
        for lane in sorted(transfers, key=lane_order)
    )


def lane_order(lane: tuple[int, Direction, LaneKind]) -> tuple[int, int, int]:
    """Sort key of (hop, direction, kind): by hop, forward before backward, critical first."""
    hop, direction, kind = lane
    return hop, get_args(Direction).index(direction), get_args(LaneKind).index(kind)


def _hop_lane(span: WaitSpan | TransferSpan) -> tuple[int, Direction, LaneKind]:
    return span.message.hop, span.message.direction, span.kind


def _parts_of_stage(
    timeline: StepTimeline, stage: int, computes: list[ComputeSpan], cuts: list[CutWait]
) -> StageParts:
    own = timeline.stages[stage]
    computes = sorted(computes, key=_times)
    waits = sorted((cut.wait for cut in cuts), key=_times)
    _check_apart(computes)
    _check_apart(waits)
    inside, outside = _by_place(waits, computes)
    spans = sorted([*computes, *outside], key=_times)
    _check_within(own, [*spans, *inside])
    return StageParts(
        stage=stage,
        rank=timeline.ranks[stage],
        compute=_length(computes) - _length(inside),
        bubble=sum(cut.bubble for cut in cuts),
        exposed=sum(cut.exposed for cut in cuts),
        host=_uncovered(own, spans),
        idle=(own.start - timeline.start) + (timeline.end - own.end),
        seconds=timeline.seconds,
    )


def _by_place(
    waits: Sequence[WaitSpan], computes: Sequence[ComputeSpan]
) -> tuple[list[WaitSpan], list[WaitSpan]]:
    """The waits inside one of the sorted compute spans, and those outside all of them."""
    starts = [span.start for span in computes]
    inside, outside = [], []
    for wait in waits:
        following = bisect_right(starts, wait.start + SLACK)
        before = computes[following - 1] if following > 0 else None
        limit = starts[following] if following < len(starts) else float("inf")
        if before is not None and wait.start < before.end - SLACK:
            inside.append(wait)
            limit = before.end
        else:
            outside.append(wait)
        if wait.end > limit + SLACK:
            raise ValueError(f"{span_name(wait)} crosses the edge of a forward or backward")
    return inside, outside


def _check_apart(spans: Sequence[ComputeSpan] | Sequence[WaitSpan]) -> None:
    for one, other in pairwise(spans):
        if other.start < one.end - SLACK:
            raise ValueError(f"{span_name(one)} overlaps {span_name(other)}")


def _check_within(own: StageSpan, spans: Iterable[ComputeSpan | WaitSpan]) -> None:
    for span in spans:
        if span.start < own.start - SLACK or span.end > own.end + SLACK:
            raise ValueError(f"{span_name(span)} lies outside the stage's own step")


def _uncovered(own: StageSpan, spans: Sequence[ComputeSpan | WaitSpan]) -> float:
    """Seconds of a stage's own step that none of the sorted spans covers."""
    uncovered, reached = 0.0, own.start
    for span in spans:
        uncovered += max(0.0, span.start - reached)
        reached = max(reached, span.end)
    return uncovered + max(0.0, own.end - reached)


def _length(spans: Iterable[ComputeSpan | WaitSpan]) -> float:
    return sum(span.end - span.start for span in spans)


def _times(span: ComputeSpan | WaitSpan) -> tuple[float, float]:
    return span.start, span.end
