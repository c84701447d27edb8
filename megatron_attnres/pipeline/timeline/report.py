"""Timelines in numbers: everything for programs (JSON), medians over steps for people (tables)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from statistics import fmean, median
from typing import Any, get_args

from megatron_attnres.pipeline.messages import Direction, LaneKind, lane_entries
from megatron_attnres.pipeline.timeline.parts import (
    HopTotals,
    hop_totals,
    lane_order,
    stage_parts,
)
from megatron_attnres.pipeline.timeline.records import StepTimeline, TimelineLayout, Timelines

PARTS = ("compute", "bubble", "exposed", "host", "idle")

HopLane = tuple[int, Direction, LaneKind]


def timelines_report(timelines: Timelines) -> dict[str, Any]:
    """The timelines in numbers that JSON can hold. Times are seconds, sizes bytes.

    Returns:
        ``layout``; ``clock_error``; ``summary``: medians over the steps of the step time and of
        each part's share of it, averaged over the stages; ``bytes_as_planned``; and per step
        ``iteration``, ``ranks``, ``seconds``, ``stages``, ``hops``, ``bytes_as_planned``. Hops are
        those of the plan and those measured; what is only in one of them has 0 in the other.

    Raises:
        ValueError: spans that cannot be (``stage_parts`` says which); no steps.
    """
    layout = timelines.layout
    planned = planned_bytes(layout)
    steps = [_step_report(step, layout.pipeline_size, planned) for step in timelines.steps]
    return {
        "layout": asdict(layout),
        "clock_error": timelines.clock_error,
        "summary": _summary(steps),
        "bytes_as_planned": all(step["bytes_as_planned"] for step in steps),
        "steps": steps,
    }


def planned_bytes(layout: TimelineLayout) -> dict[HopLane, int]:
    """Bytes of one step by (hop, direction, kind); lanes that carry nothing are left out."""
    planned = {
        (hop.index, direction, kind): lane_entries(hop, kind, layout.early_relay)
        * layout.entry_bytes
        * layout.num_microbatches
        for hop in layout.plan.hops
        for direction, kind in product(get_args(Direction), get_args(LaneKind))
    }
    return {lane: num_bytes for lane, num_bytes in planned.items() if num_bytes}


def report_table(timelines: Timelines) -> str:
    """The report for a terminal: medians over iterations, and per hop over pipelines too.

    Raises:
        ValueError: whatever ``timelines_report`` refuses.
    """
    report = timelines_report(timelines)
    return "\n".join(
        (
            *_headline(report, timelines.layout),
            "",
            *_hop_lines(report["steps"]),
            "",
            *_stage_lines(report["steps"]),
        )
    )


def _step_report(
    step: StepTimeline, pipeline_size: int, planned: Mapping[HopLane, int]
) -> dict[str, Any]:
    hops = [
        {
            **asdict(total),
            "bytes_per_second": total.bytes_per_second,
            "planned_bytes": planned.get(_lane(total), 0),
        }
        for total in _with_unseen(hop_totals(step, pipeline_size), planned)
    ]
    return {
        "iteration": step.iteration,
        "ranks": step.ranks,
        "seconds": step.seconds,
        "stages": [asdict(parts) for parts in stage_parts(step, pipeline_size)],
        "hops": hops,
        "bytes_as_planned": all(hop["num_bytes"] == hop["planned_bytes"] for hop in hops),
    }


def _with_unseen(totals: Sequence[HopTotals], planned: Iterable[HopLane]) -> list[HopTotals]:
    """The totals, and zeros for what is planned but did not cross."""
    seen = {_lane(total) for total in totals}
    unseen = [HopTotals(*lane, 0, 0, 0.0, 0.0) for lane in planned if lane not in seen]
    return sorted([*totals, *unseen], key=lambda total: lane_order(_lane(total)))


def _lane(total: HopTotals) -> HopLane:
    return total.hop, total.direction, total.kind


def _summary(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    summary = {"seconds": median(step["seconds"] for step in steps)}
    for part in PARTS:
        averages = (fmean(_share(row, part) for row in step["stages"]) for step in steps)
        summary[f"{part}_share"] = median(averages)
    return summary


def _share(parts: Mapping[str, Any], part: str) -> float:
    """A part's share of the step time; 0 of a step that took none."""
    return parts[part] / parts["seconds"] if parts["seconds"] > 0 else 0.0


def _headline(report: dict[str, Any], layout: TimelineLayout) -> Iterator[str]:
    steps, summary = report["steps"], report["summary"]
    pipelines = len({tuple(step["ranks"]) for step in steps})
    relay = "early relay" if layout.early_relay else "no early relay"
    yield (
        f"P {layout.pipeline_size}, V {layout.plan.virtual_size}, {layout.num_microbatches} "
        f"micro-batches, {layout.policy}, {relay}; {len(steps)} {_plural('step', len(steps))} of "
        f"{pipelines} {_plural('pipeline', pipelines)}"
    )
    yield (
        f"step time {summary['seconds'] * 1e3:,.2f} ms: compute {summary['compute_share']:.1%}, "
        f"bubble {summary['bubble_share']:.1%}, exposed communication "
        f"{summary['exposed_share']:.1%}, host {summary['host_share']:.1%}, "
        f"idle {summary['idle_share']:.1%}"
    )
    if report["clock_error"] > 0:
        yield f"clocks of two ranks may differ by {report['clock_error'] * 1e3:.3f} ms"
    yield f"bytes are {'' if report['bytes_as_planned'] else 'NOT '}as planned"


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


def _hop_lines(steps: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows: dict[HopLane, list[dict[str, Any]]] = defaultdict(list)
    for step in steps:
        for hop in step["hops"]:
            rows[hop["hop"], hop["direction"], hop["kind"]].append(hop)
    yield (
        f"{'hop':<24}{'messages':>10}{'bytes':>16}{'planned':>16}{'transfer ms':>14}"
        f"{'exposed wait ms':>17}{'MB/s':>12}"
    )
    for lane in sorted(rows, key=lane_order):
        yield f"{_lane_name(lane):<24}{_hop_cells(rows[lane])}"


def _lane_name(lane: HopLane) -> str:
    hop, direction, kind = lane
    ends = f"{hop}-{hop + 1}" if direction == "forward" else f"{hop + 1}-{hop}"
    return f"{ends} {direction} {kind}"


def _hop_cells(rows: Sequence[Mapping[str, Any]]) -> str:
    rates = [row["bytes_per_second"] for row in rows if row["bytes_per_second"] is not None]
    rate = f"{median(rates) / 1e6:,.1f}" if rates else "-"
    return (
        f"{_median(rows, 'messages'):>10,.0f}{_median(rows, 'num_bytes'):>16,.0f}"
        f"{_median(rows, 'planned_bytes'):>16,.0f}"
        f"{_median(rows, 'transfer_seconds') * 1e3:>14,.3f}"
        f"{_median(rows, 'exposed_seconds') * 1e3:>17,.3f}{rate:>12}"
    )


def _stage_lines(steps: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for step in steps:
        for parts in step["stages"]:
            rows[parts["rank"], parts["stage"]].append(parts)
    yield f"{'rank':>4}  {'stage':>5}" + "".join(f"{f'{part} ms':>18}" for part in PARTS)
    for rank, stage in sorted(rows):
        cells = "".join(_part_cell(rows[rank, stage], part) for part in PARTS)
        yield f"{rank:>4}  {stage:>5}{cells}"


def _part_cell(rows: Sequence[Mapping[str, Any]], part: str) -> str:
    share = median(_share(row, part) for row in rows)
    return f"{_median(rows, part) * 1e3:>9,.2f} {f'({share:.1%})':>8}"


def _median(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return median(row[name] for row in rows)
