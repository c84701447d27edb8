"""PNGs of weights and magnitudes, 1600 pixels wide. No torch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_attnres.analysis.depth import scale
from megatron_attnres.analysis.depth.layout import HEAD, SUBLAYERS, TITLES, DepthLayout, Sublayer
from megatron_attnres.analysis.depth.records import (
    DepthWeights,
    Magnitudes,
    TokenWeights,
    partial_cells,
    strongest,
    table_of,
)
from megatron_attnres.analysis.depth.token_texts import escape, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh
    from matplotlib.figure import Figure

MOST_TOKENS = 48
_WIDTH_INCHES = 16.0
_DOTS_PER_INCH = 100
_ROW_INCHES = 0.17
# Above and below a panel: title, column labels, axis label.
_AROUND_PANEL_INCHES = 1.3
_TITLE_POINTS, _LABEL_POINTS = 11.0, 8.0
# A line of labels, with a little air.
_LINE_INCHES = 1.15 * _LABEL_POINTS / 72
# Of panels side by side, and of one above the other.
_HALF_INCHES, _WHOLE_INCHES = 6.6, 14.0
_MOST_COLUMNS_IN_HALF = 40


def draw_weights(weights: DepthWeights, title: str, path: Path) -> None:
    """Draw the layer-by-source maps, before self-attention and before the MLP (paper, figure 8).

    Raises:
        OSError: the file cannot be written.
    """
    layout = weights.layout
    names = [source.name for source in layout.sources]

    def draw(axes: "Axes", sublayer: Sublayer) -> "QuadMesh":
        mesh = _draw_table(axes, table_of(weights, sublayer), layout, sublayer)
        _mark_partial(axes, weights, sublayer)
        return mesh

    if any(reader.reads_partial for reader in layout.readers):
        title += "   (dot: partial sum of the block being computed)"
    side_by_side = len(names) <= _MOST_COLUMNS_IN_HALF
    _draw_panels(draw, layout, side_by_side, names, "source", title, path)


def draw_token_weights(weights: TokenWeights, texts: Sequence[str], title: str, path: Path) -> None:
    """Draw which source every layer (row) attends to most at the first tokens (columns).

    Raises:
        OSError: the file cannot be written.
    """
    layout, shown = weights.layout, min(len(texts), MOST_TOKENS)

    def draw(axes: "Axes", sublayer: Sublayer) -> "QuadMesh":
        sources, largest = (one[:, :shown] for one in strongest(weights, sublayer))
        mesh = _draw_table(axes, largest, layout, sublayer)
        for (row, token), source in np.ndenumerate(sources):
            dark = largest[row, token] >= scale.LIGHT_FROM
            axes.text(
                token,
                row,
                layout.sources[source].short,
                fontsize=_LABEL_POINTS - 1,
                color="black" if dark else "white",
                ha="center",
                va="center_baseline",
                # Thousands of them, which all lie inside the panel.
                in_layout=False,
            )
        return mesh

    names = [_drawable(shortened(text)) for text in texts[:shown]]
    side_by_side = shown <= MOST_TOKENS // 2
    title += "   (in a cell: the source attended to most; E: embedding)"
    _draw_panels(draw, layout, side_by_side, names, "token", title, path)


def draw_magnitudes(magnitudes: Magnitudes, title: str, path: Path) -> None:
    """Draw output and gradient magnitude of every layer (paper, figure 5).

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.ticker import MaxNLocator

    figure = _figure(4.2, title)
    layers = np.arange(1, magnitudes.layout.layers + 1)
    both = (("output magnitude", magnitudes.output), ("gradient magnitude", magnitudes.gradient))
    for axes, (name, values) in zip(figure.subplots(1, 2), both, strict=True):
        if values is not None:
            axes.plot(layers, values, marker="o", markersize=4, color="#31688e")
        axes.set_title(f"{name} (root mean square)", loc="left", fontsize=10)
        axes.set_xlabel("layer" + (" (dotted: a block ends)" if magnitudes.block_ends else ""))
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        for end in magnitudes.block_ends:
            axes.axvline(end, color="#777777", linewidth=0.9, linestyle=":")
    figure.savefig(path, format="png")


def _draw_panels(
    draw: Callable[["Axes", Sublayer], "QuadMesh"],
    layout: DepthLayout,
    side_by_side: bool,
    columns: Sequence[str],
    what: str,
    title: str,
    path: Path,
) -> None:
    """A panel for each kind of sublayer, one colour bar for both."""
    panel_inches = _AROUND_PANEL_INCHES + _ROW_INCHES * (layout.layers + 1)
    grid = (1, 2) if side_by_side else (2, 1)
    figure = _figure(0.4 + grid[0] * max(3.0, panel_inches), title)
    panels = figure.subplots(*grid)
    for axes, sublayer in zip(panels, SUBLAYERS, strict=True):
        mesh = draw(axes, sublayer)
        axes.set_xlabel(what)
        _label_columns(axes, columns, _HALF_INCHES if side_by_side else _WHOLE_INCHES)
    bar = figure.colorbar(mesh, ax=panels, ticks=scale.TICKS, pad=0.01, aspect=40, fraction=0.03)
    bar.set_label(scale.LEGEND)
    bar.ax.tick_params(labelsize=_LABEL_POINTS)
    figure.savefig(path, format="png")


def _figure(height_inches: float, title: str) -> "Figure":
    # Figure and its canvas only: pyplot would ask for a display and keep every figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = _WIDTH_INCHES, height_inches
    figure = Figure(figsize=size, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    title = _drawable(title)
    figure.suptitle(title, x=0.01, ha="left", fontsize=_TITLE_POINTS, parse_math=False)
    return figure


def _draw_table(
    axes: "Axes", table: np.ndarray, layout: DepthLayout, sublayer: Sublayer
) -> "QuadMesh":
    """Cells from the top left; NaN stays blank. The last row, the head's, stands apart."""
    from matplotlib.colors import PowerNorm

    rows, columns = table.shape
    mesh = axes.pcolormesh(
        # Cell i lies around i.
        np.arange(columns + 1) - 0.5,
        np.arange(rows + 1) - 0.5,
        np.ma.masked_invalid(table),
        cmap=scale.COLOUR_MAP,
        norm=PowerNorm(scale.EXPONENT, 0, 1),
        edgecolors="white",
        linewidth=0.4,
    )
    axes.axhline(layout.layers - 0.5, color="white", linewidth=4)
    axes.invert_yaxis()
    axes.set_yticks(
        range(rows),
        [*map(str, range(1, rows)), HEAD],
        fontsize=_LABEL_POINTS,
    )
    axes.set_ylabel("layer")
    axes.tick_params(length=2)
    axes.spines[:].set_visible(False)
    axes.set_title(TITLES[sublayer], loc="left", fontsize=10)
    return mesh


def _mark_partial(axes: "Axes", weights: DepthWeights, sublayer: Sublayer) -> None:
    cells = partial_cells(weights.layout, sublayer)
    axes.scatter(
        [column for _, column in cells],
        [row for row, _ in cells],
        s=9,
        color="white",
        edgecolors="black",
        linewidths=0.6,
    )


def _label_columns(axes: "Axes", names: Sequence[str], inches: float) -> None:
    """As many names as have room, upright where the longest fits between its neighbours."""
    # A letter is about six tenths as wide as its size.
    widest = max(map(len, names)) * 0.6 * _LABEL_POINTS / 72 + _LINE_INCHES / 2
    upright = len(names) * widest <= inches
    places = (
        scale.labelled(len(names), int(inches / _LINE_INCHES)) if not upright else range(len(names))
    )
    axes.set_xticks(
        places,
        [names[place] for place in places],
        rotation=0 if upright else 90,
        fontsize=_LABEL_POINTS,
        parse_math=False,
    )


def _drawable(text: str) -> str:
    """``text`` with escapes for what the font of the pictures does not have."""
    from matplotlib.font_manager import findfont
    from matplotlib.ft2font import FT2Font

    known = FT2Font(findfont("DejaVu Sans")).get_charmap()
    return "".join(one if ord(one) in known else escape(one) for one in text)
