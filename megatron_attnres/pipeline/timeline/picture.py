"""A timeline as a picture: a row per stage, what it computed, what it waited for, what crossed."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from megatron_attnres.pipeline.messages import Direction, LaneKind
from megatron_attnres.pipeline.timeline.parts import stage_parts
from megatron_attnres.pipeline.timeline.records import (
    Side,
    StepTimeline,
    TransferSpan,
    stage_of,
)
from megatron_attnres.pipeline.timeline.waits import cut_waits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 16.0
DOTS_PER_INCH = 100
# Of a stage's row, whose height is 1: received on top, then computed, then sent.
COMPUTE_BAND = (0.27, 0.46)
STRIPS_OF_SIDE: dict[Side, tuple[float, float]] = {"receive": (0.06, 0.19), "send": (0.76, 0.19)}

COLOUR_MAPS: dict[Direction, str] = {"forward": "Blues", "backward": "Greens"}
LANE_COLOURS: dict[tuple[LaneKind, Direction], str] = {
    ("critical", "forward"): "#1f5fa8",
    ("critical", "backward"): "#2a7d3b",
    ("relay", "forward"): "#8e6bbf",
    ("relay", "backward"): "#c79a1b",
}
BUBBLE = {"facecolors": "#e4e4e4", "linewidth": 0}
# Without an outline, which would make the shortest waits look long.
EXPOSED = {"facecolors": "#ffa8a0", "edgecolors": "#c4161c", "hatch": "//////", "linewidth": 0}

Interval = tuple[float, float]


class _Rows(NamedTuple):
    """Where times and stages are: ``milliseconds`` from the step's start, stage 0 on top."""

    axes: "Axes"
    timeline: StepTimeline
    pipeline_size: int

    def boxes(self, stage: int, band: Interval, spans: Iterable[Interval], **style: Any) -> None:
        """Draw (start, end) in a band (top, height) of a stage's row."""
        ranges = [(self.milliseconds(a), (b - a) * 1e3) for a, b in spans if b > a]
        if ranges:
            self.axes.broken_barh(ranges, (stage + band[0], band[1]), **style)

    def milliseconds(self, time: float) -> float:
        return (time - self.timeline.start) * 1e3

    def points(self, seconds: float) -> float:
        """Width on paper; the axes take about nine tenths of it."""
        return seconds / (self.timeline.seconds or 1.0) * WIDTH_INCHES * 72 * 0.9


def draw_timeline(timeline: StepTimeline, pipeline_size: int, path: Path | str) -> None:
    """Draw one step as PNG, 1600 pixels wide.

    Raises:
        OSError: the file cannot be written.
        ValueError: spans that cannot be (``stage_parts`` says which).
    """
    # Figure and its canvas only: pyplot would ask for a display and keep every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    row_inches = min(1.25, max(0.6, 9 / pipeline_size))
    size = WIDTH_INCHES, 1.6 + pipeline_size * row_inches
    figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = _Rows(axes, timeline, pipeline_size)
    _label(rows)
    _draw_computes(rows)
    _draw_waits(rows)
    _draw_transfers(rows)
    _number_computes(rows, row_inches)
    _add_legend(figure, timeline, pipeline_size)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _label(rows: _Rows) -> None:
    axes, timeline = rows.axes, rows.timeline
    stages = range(rows.pipeline_size)
    axes.set_xlim(0, max(timeline.seconds * 1e3, 1e-6))
    axes.set_ylim(rows.pipeline_size, 0)
    axes.set_yticks(
        [stage + 0.5 for stage in stages],
        [f"stage {stage}\nrank {timeline.ranks[stage]}" for stage in stages],
    )
    axes.tick_params(axis="y", length=0)
    for stage in stages[1:]:
        axes.axhline(stage, color="#bbbbbb", linewidth=0.6)
    axes.set_xlabel("ms (strips above a stage: what it receives; below: what it sends)")
    axes.set_title(_title(timeline, rows.pipeline_size), loc="left")
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)


def _title(timeline: StepTimeline, pipeline_size: int) -> str:
    parts = stage_parts(timeline, pipeline_size)

    def share(part: str) -> str:
        seconds = fmean(getattr(stage, part) for stage in parts)
        return f"{seconds / (timeline.seconds or 1.0):.1%}"

    step = f"step {timeline.iteration}: " if timeline.iteration else ""
    return (
        f"{step}{timeline.seconds * 1e3:,.2f} ms; mean over stages: compute {share('compute')}, "
        f"bubble {share('bubble')}, exposed communication {share('exposed')}, "
        f"host {share('host')}, idle {share('idle')}"
    )


def _draw_computes(rows: _Rows) -> None:
    virtual_size = _virtual_size(rows.timeline, rows.pipeline_size)
    outline = min(0.5, 0.1 * _mean_width(rows))
    by_look: dict[tuple[int, Direction, int], list[Interval]] = defaultdict(list)
    for span in rows.timeline.computes:
        look = span.stage, span.direction, span.chunk // rows.pipeline_size
        by_look[look].append((span.start, span.end))
    for (stage, direction, virtual_stage), spans in by_look.items():
        colour = _shade(direction, virtual_stage, virtual_size)
        style = {"facecolors": [colour], "edgecolors": "white", "linewidth": outline}
        rows.boxes(stage, COMPUTE_BAND, spans, **style)


def _draw_waits(rows: _Rows) -> None:
    bubble: dict[int, list[Interval]] = defaultdict(list)
    exposed: dict[int, list[Interval]] = defaultdict(list)
    for wait, cut in cut_waits(rows.timeline, rows.pipeline_size):
        bubble[wait.stage].append((wait.start, cut))
        exposed[wait.stage].append((cut, wait.end))
    for stage in range(rows.pipeline_size):
        rows.boxes(stage, COMPUTE_BAND, bubble[stage], **BUBBLE)
        rows.boxes(stage, COMPUTE_BAND, exposed[stage], **EXPOSED)


def _draw_transfers(rows: _Rows) -> None:
    """A strip per kind of lane that occurs, received ones above the stage, sent ones below."""
    lanes = _lanes(rows.timeline.transfers)
    spans: dict[tuple[int, Side, LaneKind, Direction], list[Interval]] = defaultdict(list)
    for transfer in rows.timeline.transfers:
        message = transfer.message
        for side in get_args(Side):
            stage = stage_of(message, side, rows.pipeline_size)
            interval = transfer.started, transfer.completed
            spans[stage, side, transfer.kind, message.direction].append(interval)
    for (stage, side, kind, direction), intervals in spans.items():
        top, height = STRIPS_OF_SIDE[side]
        strip = height / len(lanes)
        band = top + lanes.index((kind, direction)) * strip, strip * 0.85
        colour = LANE_COLOURS[kind, direction]
        rows.boxes(stage, band, intervals, facecolors=colour, linewidth=0)


def _mean_width(rows: _Rows) -> float:
    """Of a forward or backward, in points."""
    lengths = [span.end - span.start for span in rows.timeline.computes]
    return rows.points(fmean(lengths)) if lengths else 0.0


def _number_computes(rows: _Rows, row_inches: float) -> None:
    """Micro-batch numbers in the boxes that are wide enough."""
    virtual_size = _virtual_size(rows.timeline, rows.pipeline_size)
    points = min(10.0, row_inches * COMPUTE_BAND[1] * 72 * 0.5)
    for span in rows.timeline.computes:
        number = str(span.microbatch)
        # A digit is about two thirds as wide as its size.
        if rows.points(span.end - span.start) < (len(number) * 0.65 + 0.3) * points:
            continue
        shade = _shade(span.direction, span.chunk // rows.pipeline_size, virtual_size)
        rows.axes.text(
            rows.milliseconds((span.start + span.end) / 2),
            span.stage + COMPUTE_BAND[0] + COMPUTE_BAND[1] / 2,
            number,
            fontsize=points,
            color="white" if fmean(shade[:3]) < 0.55 else "black",
            ha="center",
            va="center",
            clip_on=True,
        )


def _add_legend(figure: "Figure", timeline: StepTimeline, pipeline_size: int) -> None:
    from matplotlib.patches import Patch

    virtual_size = _virtual_size(timeline, pipeline_size)
    patches = [
        Patch(
            facecolor=_shade(direction, virtual_stage, virtual_size),
            label=f"{direction}, chunks {virtual_stage * pipeline_size} to "
            f"{(virtual_stage + 1) * pipeline_size - 1}",
        )
        for direction in get_args(Direction)
        for virtual_stage in range(virtual_size)
    ]
    patches += [
        Patch(facecolor=BUBBLE["facecolors"], label="bubble: the other end is not there yet"),
        Patch(
            facecolor=EXPOSED["facecolors"],
            edgecolor=EXPOSED["edgecolors"],
            hatch=EXPOSED["hatch"],
            label="exposed communication",
        ),
    ]
    patches += [
        Patch(facecolor=LANE_COLOURS[lane], label=" ".join((*lane, "transfer")))
        for lane in _lanes(timeline.transfers)
    ]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize="small"
    )


def _lanes(transfers: Sequence[TransferSpan]) -> list[tuple[LaneKind, Direction]]:
    """The lanes that occur, in a fixed order."""
    occurring = {(transfer.kind, transfer.message.direction) for transfer in transfers}
    return [lane for lane in LANE_COLOURS if lane in occurring]


def _virtual_size(timeline: StepTimeline, pipeline_size: int) -> int:
    return 1 + max((span.chunk // pipeline_size for span in timeline.computes), default=0)


def _shade(direction: Direction, virtual_stage: int, virtual_size: int) -> tuple[float, ...]:
    """Darker from one virtual stage to the next."""
    from matplotlib import colormaps

    depth = virtual_stage / max(virtual_size - 1, 1)
    return colormaps[COLOUR_MAPS[direction]](0.38 + 0.42 * depth)
