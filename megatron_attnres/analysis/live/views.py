"""What the page shows of a reading: lines of words, figures, rows of a table. No torch, no page."""

from typing import TYPE_CHECKING

from megatron_attnres.analysis.depth.figures import (
    Room,
    magnitudes_figure,
    map_figure,
    strongest_figure,
)
from megatron_attnres.analysis.depth.layout import HEAD, TITLES, DepthLayout, Sublayer
from megatron_attnres.analysis.depth.records import strongest
from megatron_attnres.analysis.live.reading import Reading

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

HEADERS = ["#", "token", "attends most to", "weight"]


def notice_of(reading: Reading | None, context: int) -> str:
    """One line: what was read."""
    if reading is None:
        return "Nothing to read yet: type a text."
    count = len(reading.texts)
    if reading.cut:
        read = f"The text is longer than the model's context: shown are its last {count:,} tokens."
    else:
        read = f"{count:,} of at most {context:,} tokens."
    loss = reading.magnitudes.loss
    read += "" if loss is None else f" Loss {loss:.3f} nats per token."
    return read if reading.weights is not None else f"{read} A baseline has no depth weights."


def map_of(reading: Reading | None, sublayer: Sublayer, token: int, room: Room) -> "Figure | None":
    """The layer-by-source map of a token, counted from 1, or for 0 the mean over all tokens.

    A token that the text does not have is taken for 0. None where there are no weights.
    """
    if reading is None or reading.weights is None:
        return None
    if not 1 <= token <= len(reading.texts):
        title = f"{TITLES[sublayer]} weights, mean over all tokens"
        return map_figure(reading.weights.mean(), sublayer, title, room)
    title = f"{TITLES[sublayer]} weights, token {token}: {reading.texts[token - 1]}"
    return map_figure(reading.weights.at(token - 1), sublayer, title, room)


def strongest_of(reading: Reading | None, sublayer: Sublayer, room: Room) -> "Figure | None":
    """Of every token and layer the most attended source; None where there are no weights."""
    if reading is None or reading.weights is None:
        return None
    title = f"{TITLES[sublayer]}: most attended source of every token and layer"
    return strongest_figure(reading.weights, reading.texts, sublayer, title, room)


def magnitudes_of(reading: Reading | None) -> "Figure | None":
    """Magnitudes over the tokens."""
    return None if reading is None else magnitudes_figure(reading.magnitudes)


def rows_of(reading: Reading | None, sublayer: Sublayer, layer: str) -> list[list[str]]:
    """Rows below ``HEADERS``: for every token the most attended source of one layer.

    Args:
        reading: of the text.
        sublayer: whose readers.
        layer: its number or ``HEAD``; a number beyond the model's last layer is its last.
    """
    if reading is None or reading.weights is None:
        return []
    layout = reading.weights.layout
    row = layout.layers if layer == HEAD else min(int(layer), layout.layers) - 1
    sources, largest = strongest(reading.weights, sublayer)
    return [
        [str(place + 1), text, layout.sources[source].name, f"{weight:.4f}"]
        for place, (text, source, weight) in enumerate(
            zip(reading.texts, sources[row], largest[row], strict=True)
        )
    ]


def layers_of(layouts: list[DepthLayout]) -> list[str]:
    """What a choice of layers offers: the head, then those of the deepest model, last one first."""
    most = max(layout.layers for layout in layouts)
    return [HEAD, *map(str, range(most, 0, -1))]
