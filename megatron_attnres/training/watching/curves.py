"""Runs as curves over tokens, in one picture: losses, gradient norms, speed. No torch."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_attnres.training.watching.events import ALARMS
from megatron_attnres.training.watching.run_contents import (
    RunContents,
    number_in,
    parsed_iterations,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (11.0, 9.0)
DOTS_PER_INCH = 120
# Of the three axes, from above.
HEIGHTS = (3, 1.2, 1.2)
LINE_STYLES = ("-", "--", ":", "-.")
COLOURS = 10
# A curve of more points is drawn faint, and on it the median of every so many points that this
# many remain.
MOST_POINTS = 400
COLUMNS = ("tokens", "lm_loss", "grad_norm", "tokens_per_second")
MARKERS = {
    "failure": "X",
    "gave up": "P",
    "skipped": "s",
    "loss spike": "^",
    "gradient norm": "D",
    "straggler": "v",
}


class Point(NamedTuple):
    """Something on the curve of losses."""

    tokens: float
    loss: float


@dataclass(frozen=True)
class Curves:
    """A run over tokens; figures that an iteration lacks are NaN.

    Attributes:
        name: of the run.
        tokens: trained on at the end of each iteration.
        losses: nats per token.
        grad_norms: before clipping.
        speeds: tokens per second.
        validations: validation losses.
        alarms: where they lie on the curve of losses, by kind.
    """

    name: str
    tokens: Sequence[float]
    losses: Sequence[float]
    grad_norms: Sequence[float]
    speeds: Sequence[float]
    validations: Sequence[Point]
    alarms: Mapping[str, Sequence[Point]]


def read_curves(name: str, contents: RunContents) -> Curves:
    """All iterations of a run; no curve if it has no metrics yet.

    Args:
        name: what to call it.
        contents: of its folder.
    """
    iterations: list[int] = []
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    validations = []
    # Only what is drawn is kept: a long run has hundreds of thousands of lines.
    for line in parsed_iterations(_lines_of(contents.folder.metrics)):
        iterations.append(line["iteration"])
        for column, values in columns.items():
            values.append(_finite_in(line, column))
        if "validation_loss" in line:
            validations.append(Point(columns["tokens"][-1], _finite_in(line, "validation_loss")))
    tokens, losses, norms, speeds = columns.values()
    # There is no place for 0 on a logarithmic axis.
    grad_norms = [norm if norm > 0 else math.nan for norm in norms]
    points = [Point(*both) for both in zip(tokens, losses, strict=True)]
    alarms = alarm_points(contents.events, iterations, points)
    return Curves(name, tokens, losses, grad_norms, speeds, validations, alarms)


def alarm_points(
    events: Sequence[Mapping[str, Any]], iterations: Sequence[int], points: Sequence[Point]
) -> dict[str, list[Point]]:
    """Where alarms lie on a curve of losses, by kind.

    An alarm lies at its iteration, or at the last one before it that has a loss. Alarms about
    iterations that a later start did again are left out: the curve shows the second time. Failures
    are left out only where the run was begun anew.

    Args:
        events: of the run, the oldest first.
        iterations: of the curve, ascending.
        points: of these iterations.
    """
    found: dict[str, list[Point]] = {}
    goes_on_after = math.inf
    for event in reversed(events):
        kind, iteration = event["kind"], event["iteration"]
        if kind == "start":
            goes_on_after = min(goes_on_after, iteration)
        is_of_curve = goes_on_after > 0 if kind == "failure" else iteration <= goes_on_after
        if kind in ALARMS and is_of_curve:
            before = range(bisect_right(iterations, iteration) - 1, -1, -1)
            point = next((points[at] for at in before if _is_finite(points[at])), None)
            if point is not None:
                found.setdefault(kind, []).append(point)
    return found


def thinned(
    tokens: Sequence[float], values: Sequence[float], most: int
) -> tuple[list[float], list[float]]:
    """A curve of ``most`` points at most: means of tokens, medians of finite values (else NaN)."""
    size = math.ceil(len(tokens) / most)
    windows = [slice(start, start + size) for start in range(0, len(tokens), size or 1)]
    return [fmean(tokens[one]) for one in windows], [_finite_median(values[one]) for one in windows]


def draw_curves(runs: Sequence[Curves], path: Path | str) -> None:
    """Draw all runs in one PNG.

    Raises:
        OSError: the file cannot be written.
    """
    # Loaded on use: it takes longer than everything else. Pyplot would ask for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    losses, norms, speeds = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": HEIGHTS}
    )
    norms.set_yscale("log")
    for index, run in enumerate(runs):
        look = _look(index)
        _draw_line(losses, run.tokens, run.losses, look)
        _draw_line(norms, run.tokens, run.grad_norms, look)
        _draw_line(speeds, run.tokens, run.speeds, look)
        _draw_points(losses, run, look["color"])
    _label(losses, norms, speeds)
    figure.align_ylabels()
    _add_legends(figure, runs)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def _lines_of(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from file


def _finite_in(line: Mapping[str, Any], name: str) -> float:
    """NaN for what is missing or not finite: matplotlib leaves it out."""
    value = number_in(line, name)
    return value if value is not None and math.isfinite(value) else math.nan


def _is_finite(point: Point) -> bool:
    return all(map(math.isfinite, point))


def _finite_median(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else math.nan


def _look(index: int) -> dict[str, Any]:
    """Of a run's lines: another style when all colours are used up."""
    style = LINE_STYLES[index // COLOURS % len(LINE_STYLES)]
    return {"color": f"C{index % COLOURS}", "linestyle": style}


def _draw_line(
    axes: "Axes", tokens: Sequence[float], values: Sequence[float], look: Mapping[str, Any]
) -> None:
    if len(tokens) <= MOST_POINTS:
        # A line through one point cannot be seen.
        axes.plot(tokens, values, linewidth=1.3, marker="." if len(tokens) == 1 else "", **look)
        return
    axes.plot(tokens, values, linewidth=0.5, alpha=0.3, color=look["color"])
    axes.plot(*thinned(tokens, values, MOST_POINTS), linewidth=1.5, **look)


def _draw_points(axes: "Axes", run: Curves, colour: str) -> None:
    """Validation losses as dots, alarms as small dark markers, above the lines of all runs."""
    if run.validations:
        style = {"s": 28, "color": colour, "edgecolors": "white", "linewidths": 0.8}
        axes.scatter(*zip(*run.validations, strict=True), zorder=3, **style)
    for kind, points in run.alarms.items():
        size = 70 if kind in ("failure", "gave up") else 34
        style = {"s": size, "color": colour, "edgecolors": "black", "linewidths": 0.9}
        axes.scatter(*zip(*points, strict=True), marker=MARKERS[kind], zorder=4, **style)


def _label(losses: "Axes", norms: "Axes", speeds: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    losses.set_ylabel("loss (nats per token)")
    norms.set_ylabel("gradient norm")
    # Norms of one run often lie within a decade.
    norms.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    norms.minorticks_off()
    speeds.set_ylabel("tokens per second")
    speeds.set_ylim(bottom=0)
    speeds.set_xlabel("tokens")
    for axis in (speeds.xaxis, speeds.yaxis, norms.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    for axes in (losses, norms, speeds):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)


def short_number(value: float) -> str:
    """With K, M, B (10^9) or T, as people count tokens."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


def _add_legends(figure: "Figure", runs: Sequence[Curves]) -> None:
    """Runs by colour on top; below, what the dots and markers that occur mean."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **_look(index)) for index in range(len(runs))]
    names = [_plain(run.name) + ("" if run.tokens else " (no iterations)") for run in runs]
    figure.legend(lines, names, loc="outside upper center", ncols=4, frameon=False)
    style = {"linestyle": "", "color": "0.6", "markersize": 6}
    markers = [
        Line2D([], [], marker=MARKERS[kind], markeredgecolor="black", label=kind, **style)
        for kind in MARKERS
        if any(kind in run.alarms for run in runs)
    ]
    if any(run.validations for run in runs):
        markers.insert(0, Line2D([], [], marker="o", label="validation loss", **style))
    if markers:
        figure.legend(handles=markers, loc="outside lower center", ncols=6, frameon=False)


def _plain(name: str) -> str:
    """A folder's name that matplotlib takes for no formula."""
    return name.replace("$", r"\$")
