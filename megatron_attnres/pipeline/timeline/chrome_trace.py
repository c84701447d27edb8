"""Timelines in Chrome's Trace Event Format, for Perfetto (ui.perfetto.dev) or chrome://tracing.

A process per rank. Its first row is the schedule: the step, in it forwards and backwards, and the
waits between and inside them. Below it a row per end of a lane; an arrow leads from where a
transfer is sent to where it is received.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import count, product
from typing import Any, NamedTuple, get_args

from megatron_attnres.pipeline.messages import Direction, LaneKind
from megatron_attnres.pipeline.timeline.records import (
    ComputeSpan,
    Side,
    StepTimeline,
    Timelines,
    TransferSpan,
    stage_of,
)
from megatron_attnres.pipeline.timeline.waits import CutWait, cut_waits

# From 1: thread 0 of process 0 is the idle task to Perfetto.
COMPUTE_ROW = 1
# By (kind, direction, side); a lane's two ends have neighbouring rows.
LANE_ROWS: dict[tuple[LaneKind, Direction, Side], int] = {
    lane_end: row
    for row, lane_end in enumerate(
        product(get_args(LaneKind), get_args(Direction), get_args(Side)), start=COMPUTE_ROW + 1
    )
}
ROW_NAMES = {COMPUTE_ROW: "compute"} | {
    row: f"{side} {kind} {direction}" for (kind, direction, side), row in LANE_ROWS.items()
}
# Between two iterations, of the longer one's step time.
GAP = 0.05

Event = dict[str, Any]


class _Slice(NamedTuple):
    """A complete event; ``start`` and ``end`` are whole nanoseconds.

    Perfetto counts in them, so what touches in the timeline touches in the picture.
    """

    rank: int
    row: int
    name: str
    categories: str
    start: int
    end: int
    args: dict[str, Any]


class _Placed(NamedTuple):
    """A step and what to add to its times, in seconds."""

    step: StepTimeline
    offset: float

    def nanoseconds(self, time: float) -> int:
        return round((time + self.offset) * 1e9)


def chrome_trace(timelines: Timelines) -> dict[str, Any]:
    """The trace, to be written as JSON.

    Iterations follow one another; the pipelines of one iteration start together.

    Raises:
        ValueError: a wait without its transfer.
    """
    pipeline_size = timelines.layout.pipeline_size
    flow_ids = count(1)
    slices: list[_Slice] = []
    arrows: list[Event] = []
    for placed in _one_after_another(timelines.steps):
        slices += _nested(_compute_slices(placed, pipeline_size))
        for sent, received in _transfer_slices(placed, pipeline_size):
            slices += (sent, received)
            arrows += _arrow(sent, received, next(flow_ids))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"layout": asdict(timelines.layout), "clock_error": timelines.clock_error},
        "traceEvents": [*_names(timelines.steps, slices), *map(_complete_event, slices), *arrows],
    }


def _one_after_another(steps: Iterable[StepTimeline]) -> Iterator[_Placed]:
    offset, longest = 0.0, 0.0
    iteration: int | None = None
    busy: set[int] = set()
    for step in steps:
        if step.iteration != iteration or not busy.isdisjoint(step.ranks):
            offset += longest * (1 + GAP)
            iteration, longest, busy = step.iteration, 0.0, set()
        busy.update(step.ranks)
        longest = max(longest, step.seconds)
        yield _Placed(step, offset - step.start)


def _compute_slices(placed: _Placed, pipeline_size: int) -> list[_Slice]:
    """What one step has on the ranks' first rows, outer slices before inner ones."""
    step = placed.step
    steps = [
        _slice(placed, stage, f"step {step.iteration}", "step", span.start, span.end, {})
        for stage, span in enumerate(step.stages)
    ]
    computes = [_compute_slice(placed, span, pipeline_size) for span in step.computes]
    waits = [_wait_slice(placed, cut) for cut in cut_waits(step, pipeline_size)]
    return [*steps, *computes, *waits]


def _compute_slice(placed: _Placed, span: ComputeSpan, pipeline_size: int) -> _Slice:
    return _slice(
        placed,
        span.stage,
        f"{span.direction[0].upper()} c{span.chunk} m{span.microbatch}",
        f"compute,{span.direction}",
        span.start,
        span.end,
        {
            "chunk": span.chunk,
            "virtual stage": span.chunk // pipeline_size,
            "micro-batch": span.microbatch,
        },
    )


def _wait_slice(placed: _Placed, cut: CutWait) -> _Slice:
    wait = cut.wait
    return _slice(
        placed,
        wait.stage,
        f"wait {wait.message}, {wait.kind}",
        f"wait,{wait.kind},{wait.message.direction},{wait.side}",
        wait.start,
        wait.end,
        {"side": wait.side, "bubble ms": cut.bubble * 1e3, "exposed ms": cut.exposed * 1e3},
    )


def _slice(
    placed: _Placed,
    stage: int,
    name: str,
    categories: str,
    start: float,
    end: float,
    args: dict[str, Any],
) -> _Slice:
    """A slice of a stage's first row."""
    rank = placed.step.ranks[stage]
    start_ns, end_ns = placed.nanoseconds(start), placed.nanoseconds(end)
    return _Slice(rank, COMPUTE_ROW, name, categories, start_ns, end_ns, args)


def _nested(slices: Sequence[_Slice]) -> Iterator[_Slice]:
    """The slices with edges moved where rounding made two of a row overlap without nesting."""
    rows: dict[int, list[_Slice]] = defaultdict(list)
    for one in slices:
        rows[one.rank].append(one)
    for row in rows.values():
        opened: list[_Slice] = []
        reached = min(one.start for one in row)
        for one in sorted(row, key=lambda one: (one.start, -one.end)):
            while opened and one.start + one.end >= 2 * opened[-1].end:
                reached = max(reached, opened.pop().end)
            start = max(one.start, reached)
            end = min(one.end, opened[-1].end) if opened else one.end
            opened.append(one._replace(start=start, end=max(start, end)))
            yield opened[-1]


def _transfer_slices(placed: _Placed, pipeline_size: int) -> Iterator[tuple[_Slice, _Slice]]:
    """Both ends of every transfer of a step."""
    lanes: dict[tuple[LaneKind, Direction, int], list[TransferSpan]] = defaultdict(list)
    for transfer in placed.step.transfers:
        sender = stage_of(transfer.message, "send", pipeline_size)
        lanes[transfer.kind, transfer.message.direction, sender].append(transfer)
    for transfers in lanes.values():
        reached: int | None = None
        for transfer in sorted(transfers, key=lambda one: (one.started, one.completed)):
            # A lane carries one message after another; clocks that differ a little may not say so.
            start, end = map(placed.nanoseconds, (transfer.started, transfer.completed))
            start = start if reached is None else max(start, reached)
            reached = max(start, end)
            yield (
                _lane_slice(placed, transfer, "send", (start, reached), pipeline_size),
                _lane_slice(placed, transfer, "receive", (start, reached), pipeline_size),
            )


def _lane_slice(
    placed: _Placed,
    transfer: TransferSpan,
    side: Side,
    times: tuple[int, int],
    pipeline_size: int,
) -> _Slice:
    step, message, kind = placed.step, transfer.message, transfer.kind
    seconds = transfer.completed - transfer.started
    return _Slice(
        step.ranks[stage_of(message, side, pipeline_size)],
        LANE_ROWS[kind, message.direction, side],
        f"{message}, {kind}",
        f"transfer,{kind},{message.direction},{side}",
        *times,
        {
            "bytes": transfer.num_bytes,
            "MB/s": transfer.num_bytes / seconds / 1e6 if seconds > 0 else None,
            "send posted ms": (transfer.send_posted - step.start) * 1e3,
            "receive posted ms": (transfer.receive_posted - step.start) * 1e3,
        },
    )


def _complete_event(one: _Slice) -> Event:
    return {
        "ph": "X",
        "pid": one.rank,
        "tid": one.row,
        "name": one.name,
        "cat": one.categories,
        "ts": one.start / 1e3,
        "dur": (one.end - one.start) / 1e3,
        "args": one.args,
    }


def _arrow(sent: _Slice, received: _Slice, flow_id: int) -> tuple[Event, Event]:
    common = {"name": "transfer", "cat": "transfer", "id": flow_id}
    # In the receiving slice's middle: at its end another slice may begin.
    middle = (received.start + received.end) // 2
    start = {"ph": "s", "pid": sent.rank, "tid": sent.row, "ts": sent.start / 1e3}
    finish = {"ph": "f", "bp": "e", "pid": received.rank, "tid": received.row, "ts": middle / 1e3}
    return common | start, common | finish


def _names(steps: Iterable[StepTimeline], slices: Iterable[_Slice]) -> Iterator[Event]:
    """Metadata: ranks by pipeline and stage, rows in their order."""
    stages = {rank: stage for step in steps for stage, rank in enumerate(step.ranks)}
    for order, (rank, stage) in enumerate(stages.items()):
        yield _metadata(rank, COMPUTE_ROW, "process_name", name=f"rank {rank} (stage {stage})")
        yield _metadata(rank, COMPUTE_ROW, "process_sort_index", sort_index=order)
    for rank, row in sorted({(one.rank, one.row) for one in slices}):
        yield _metadata(rank, row, "thread_name", name=ROW_NAMES[row])
        yield _metadata(rank, row, "thread_sort_index", sort_index=row)


def _metadata(rank: int, row: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": rank, "tid": row, "name": what, "args": args}
