"""A sweep as a picture: overhead over the number of blocks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_attnres.analysis.predictions.sweep import NAIVE, SweepPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (7.0, 4.5)
DOTS_PER_INCH = 160


def draw_sweep(points: Sequence[SweepPoint], path: Path | str) -> None:
    """Draw a line per V and policy; a V has one colour, dashed where naive.

    Raises:
        OSError: the file cannot be written.
    """
    # Loaded on use: it takes longer than most sweeps.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_lines(axes, points)
    _label(axes, points)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def _draw_lines(axes: "Axes", points: Sequence[SweepPoint]) -> None:
    sizes = sorted({point.virtual_size for point in points})
    colors = {size: f"C{index}" for index, size in enumerate(sizes)}
    lines = sorted({(point.virtual_size, point.policy) for point in points})
    for size, policy in lines:
        own = [p for p in points if (p.virtual_size, p.policy) == (size, policy)]
        own.sort(key=lambda point: point.num_blocks)
        axes.plot(
            [point.num_blocks for point in own],
            [100 * point.overhead for point in own],
            color=colors[size],
            linestyle="--" if policy == NAIVE else "-",
            marker="o",
            markersize=4,
            label=f"V = {size}, {policy}",
        )


def _label(axes: "Axes", points: Sequence[SweepPoint]) -> None:
    blocks = sorted({point.num_blocks for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(blocks, [str(count) for count in blocks])
    axes.set_xlabel("number of blocks")
    axes.set_ylabel("step time beyond that of standard residuals")
    if min(point.overhead for point in points) > 0:
        # What is worth choosing between lies far below what is not.
        _scale_logarithmically(axes)
    axes.yaxis.set_major_formatter(lambda percent, _: f"{percent:g} %")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")


def _scale_logarithmically(axes: "Axes") -> None:
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
