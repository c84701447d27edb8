"""Plotly figures of weights and magnitudes, for the report and the live page alike. No torch.

Plotly reads some HTML in what it writes: every text that is not ours must be escaped (``plain``).
"""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_attnres.analysis.depth import scale
from megatron_attnres.analysis.depth.layout import HEAD, TITLES, DepthLayout, Sublayer
from megatron_attnres.analysis.depth.records import (
    DepthWeights,
    Magnitudes,
    TokenWeights,
    partial_cells,
    strongest,
    table_of,
)
from megatron_attnres.analysis.depth.token_texts import shortened

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


class Room(NamedTuple):
    """What can be written side by side in a figure.

    Attributes:
        labels: upright ones below it.
        letters: in a row of its cells.
    """

    labels: int
    letters: int


# Of a page as wide as a screen, and of one of two columns on it.
WIDE, NARROW = Room(64, 190), Room(28, 75)
_ROW_LABELS = 52
_LAYER_LABELS = 12
_ROW_PIXELS = 14
# Nothing of a page goes to another host: Plotly's own default is a button that sends charts to it.
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "modeBarButtonsToRemove": ["select2d", "lasso2d"],
}
_FONT = {"family": "system-ui, sans-serif", "size": 12, "color": "#222222"}


def map_figure(
    weights: DepthWeights, sublayer: Sublayer, title: str = "", room: Room = WIDE
) -> "Figure":
    """A layer-by-source map: rows are the readers of a kind of sublayer, and the head.

    A cell's custom data say which it is; a dot marks the weight of a partial sum.

    Args:
        weights: of the model's readers.
        sublayer: whose readers.
        title: plain text.
        room: for labels.
    """
    from plotly.graph_objects import Figure, Heatmap, Scatter

    layout = weights.layout
    cells = Heatmap(
        z=_blank(table_of(weights, sublayer)),
        customdata=_cell_names(layout, sublayer),
        hovertemplate="%{customdata}<br>weight %{z:.4f}<extra></extra>",
        hoverongaps=False,
        coloraxis="coloraxis",
        xgap=1 if len(layout.sources) <= room.labels else 0,
        ygap=1,
    )
    partial = partial_cells(layout, sublayer)
    dots = Scatter(
        x=[column for _, column in partial],
        y=[row for row, _ in partial],
        mode="markers",
        marker={"size": 4, "color": "white", "line": {"width": 0.7, "color": "black"}},
        hoverinfo="skip",
        showlegend=False,
    )
    figure = Figure([cells, dots])
    rows = [str(layer) for layer in range(1, layout.layers + 1)] + [HEAD]
    names = [source.name for source in layout.sources]
    columns = scale.labelled(len(names), room.labels)
    _set_axes(figure, rows, f"layer ({TITLES[sublayer]})")
    figure.update_xaxes(
        title="source" + (" (dot: partial sum of the block being computed)" if partial else ""),
        tickvals=list(columns),
        ticktext=[names[column] for column in columns],
        range=[-0.5, len(names) - 0.5],
        tickangle=0 if sum(map(len, names)) <= room.letters // 2 else -90,
    )
    _set_title(figure, title)
    return figure


def strongest_figure(
    weights: TokenWeights,
    texts: Sequence[str],
    sublayer: Sublayer,
    title: str,
    room: Room = WIDE,
) -> "Figure":
    """For every token (column) and layer (row) the source with the largest weight, and that weight.

    Args:
        weights: of the tokens.
        texts: of each token, as ``token_texts`` makes them.
        sublayer: whose readers.
        title: plain text.
        room: for labels, and for the names of sources in the cells.
    """
    from plotly.graph_objects import Figure, Heatmap

    layout = weights.layout
    sources, largest = strongest(weights, sublayer)
    names = [
        [
            f"{plain(text)} (token {place + 1}): {reader.name}<br>attends most to "
            f"{layout.sources[sources[row, place]].name}"
            for place, text in enumerate(texts)
        ]
        for row, (_, reader) in enumerate(layout.of(sublayer))
    ]
    letters = len(texts) * max(len(source.short) for source in layout.sources)
    cells = Heatmap(
        z=largest,
        text=[[layout.sources[column].short for column in row] for row in sources],
        texttemplate="%{text}" if letters <= room.letters else None,
        textfont={"size": 10},
        customdata=names,
        hovertemplate="%{customdata}<br>weight %{z:.4f}<extra></extra>",
        coloraxis="coloraxis",
        xgap=1,
        ygap=1,
    )
    figure = Figure([cells])
    rows = [str(layer) for layer in range(1, layout.layers + 1)] + [HEAD]
    tokens = scale.labelled(len(texts), room.labels)
    _set_axes(figure, rows, f"layer ({TITLES[sublayer]})")
    figure.update_xaxes(
        title="token",
        tickvals=list(tokens),
        ticktext=[plain(shortened(texts[token])) for token in tokens],
        range=[-0.5, len(texts) - 0.5],
        tickangle=-90,
    )
    _set_title(figure, title)
    return figure


def magnitudes_figure(magnitudes: Magnitudes, title: str = "") -> "Figure":
    """Output and gradient magnitude of every layer, over its number.

    Args:
        magnitudes: of the model.
        title: plain text.
    """
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, subplot_titles=("output magnitude", "gradient magnitude"))
    layers = list(range(1, magnitudes.layout.layers + 1))
    labelled = [layers[place] for place in scale.labelled(len(layers), _LAYER_LABELS)]
    for column, values in enumerate((magnitudes.output, magnitudes.gradient), start=1):
        if values is not None:
            figure.add_scatter(
                x=layers,
                y=values,
                mode="lines+markers",
                line={"color": "#31688e"},
                hovertemplate="layer %{x}: %{y:.4g}<extra></extra>",
                showlegend=False,
                row=1,
                col=column,
            )
    for end in magnitudes.block_ends:
        figure.add_vline(end, line={"color": "#cccccc", "width": 1}, layer="below")
    figure.update_xaxes(title="layer", tickvals=labelled)
    figure.update_yaxes(rangemode="tozero", exponentformat="power", gridcolor="#eeeeee")
    figure.update_layout(height=320, **_look())
    _set_title(figure, title)
    return figure


def plain(text: str) -> str:
    """``text`` for Plotly to write as it is."""
    return escape(text, quote=False)


def _cell_names(layout: DepthLayout, sublayer: Sublayer) -> list[list[str]]:
    partial = set(partial_cells(layout, sublayer))
    return [
        [
            f"{reader.name}; source: {source.name}"
            + (" (partial sum)" if (row, column) in partial else "")
            for column, source in enumerate(layout.sources)
        ]
        for row, (_, reader) in enumerate(layout.of(sublayer))
    ]


def _blank(table: np.ndarray) -> list[list[float | None]]:
    """With None, which every version of the library that draws takes for a gap, for NaN."""
    return [[None if np.isnan(cell) else float(cell) for cell in row] for row in table]


def _set_axes(figure: "Figure", rows: Sequence[str], title: str) -> None:
    places = [*scale.labelled(len(rows) - 1, _ROW_LABELS), len(rows) - 1]
    figure.update_yaxes(
        title=title,
        tickvals=places,
        ticktext=[rows[place] for place in places],
        range=[len(rows) - 0.5, -0.5],
    )
    # The head's row stands apart.
    figure.add_hline(len(rows) - 1.5, line={"color": "white", "width": 4})
    figure.update_xaxes(showgrid=False, zeroline=False, automargin=True)
    figure.update_yaxes(showgrid=False, zeroline=False, automargin=True)
    figure.update_layout(
        height=max(340, _ROW_PIXELS * len(rows) + 190),
        coloraxis={
            "colorscale": colour_scale(),
            "cmin": 0,
            "cmax": 1,
            "colorbar": {
                "title": {"text": scale.LEGEND, "side": "right"},
                "thickness": 14,
                "tickvals": [0, 0.1, 0.2, 0.4, 0.6, 0.8, 1],
            },
        },
        **_look(),
    )


def colour_scale() -> list[list[float | str]]:
    """Plotly's colour scale, whose colours follow the square root of the weight."""
    from plotly.colors import sequential

    colours = sequential.Viridis
    last = len(colours) - 1
    return [
        [(place / last) ** (1 / scale.EXPONENT), colour] for place, colour in enumerate(colours)
    ]


def _look() -> dict[str, object]:
    return {
        "font": _FONT,
        "plot_bgcolor": "white",
        "paper_bgcolor": "white",
        "margin": {"l": 60, "r": 20, "t": 30, "b": 60},
    }


def _set_title(figure: "Figure", title: str) -> None:
    """Plain text; without it the figure needs less room."""
    if title:
        margin = {"t": 50}
        figure.update_layout(title={"text": plain(title), "font": {"size": 14}}, margin=margin)
