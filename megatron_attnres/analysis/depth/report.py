"""A report of weights as one HTML file that needs no network. No torch."""

import json
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from megatron_attnres.analysis.depth import scale
from megatron_attnres.analysis.depth.embedding import FULL_WEIGHT, encode_weights, script_json
from megatron_attnres.analysis.depth.figures import (
    CONFIG,
    colour_scale,
    magnitudes_figure,
    map_figure,
)
from megatron_attnres.analysis.depth.layout import SUBLAYERS, TITLES, DepthLayout
from megatron_attnres.analysis.depth.records import (
    DEFINITIONS,
    DepthWeights,
    Magnitudes,
    TokenWeights,
)


def report_page(
    title: str,
    about: str,
    weights: DepthWeights,
    tokens: TokenWeights,
    texts: list[str],
    magnitudes: Magnitudes,
) -> str:
    """The page: a map of mean weights, the tokens, what each of them attends to, magnitudes.

    Args:
        title, about: plain text: the run, and what the means are over.
        weights: means of the model's readers.
        tokens: weights of each token of a short text.
        texts: of these tokens, as ``token_texts`` makes them.
        magnitudes: of the same model.
    """
    page = Template(_part("report.html"))
    return page.substitute(
        title=escape(title),
        about=escape(about),
        style=_part("report.css"),
        magnitudes=_drawn_with_library(magnitudes),
        definitions="".join(
            f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in DEFINITIONS.items()
        ),
        data=script_json(_data(weights, tokens, texts)),
        script=_part("report.js"),
    )


def _data(weights: DepthWeights, tokens: TokenWeights, texts: list[str]) -> dict[str, Any]:
    """What report.js reads."""
    layout = weights.layout
    return {
        "figures": {
            sublayer: json.loads(map_figure(weights, sublayer).to_json()) for sublayer in SUBLAYERS
        },
        "config": CONFIG,
        "titles": TITLES,
        "mean": "mean over all tokens",
        "tokens": texts,
        # Of each row of a map, its reader; of each reader, how many sources it reads.
        "readers": {sublayer: _places(layout, sublayer) for sublayer in SUBLAYERS},
        "sources": [reader.sources for reader in layout.readers],
        "weights": encode_weights(tokens),
        "full_weight": FULL_WEIGHT,
        "colours": [[place, _red_green_blue(colour)] for place, colour in colour_scale()],
        "light_from": scale.LIGHT_FROM,
    }


def _places(layout: DepthLayout, sublayer: Any) -> list[int]:
    return [place for place, _ in layout.of(sublayer)]


def _red_green_blue(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]


def _drawn_with_library(magnitudes: Magnitudes) -> str:
    """The figure as HTML, together with Plotly's library, which the map uses as well."""
    return magnitudes_figure(magnitudes).to_html(
        full_html=False, include_plotlyjs=True, div_id="magnitudes", config=CONFIG
    )


def _part(name: str) -> str:
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")
