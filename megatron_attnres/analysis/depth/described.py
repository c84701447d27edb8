"""Which model was measured over which text: the words of titles, and the JSON of all results."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_attnres.analysis.depth.layout import HEAD, DepthLayout, Reader
from megatron_attnres.analysis.depth.records import (
    DEFINITIONS,
    DepthWeights,
    Measurement,
    TokenWeights,
)
from megatron_attnres.training.checkpoints.stored_model import StoredModel


@dataclass(frozen=True)
class Subject:
    """What was measured.

    Attributes:
        stored: the checkpoint.
        origin: of the text.
        tokens: read.
    """

    stored: StoredModel
    origin: str
    tokens: int

    @property
    def title(self) -> str:
        """Names the run."""
        return _encodable(f"{self.stored.given}, iteration {self.stored.iteration:,}")

    @property
    def about(self) -> str:
        """What the means are over."""
        attn_res = self.stored.model.attn_res
        mode = attn_res.mode
        if mode == "block":
            mode = f"blocks of {attn_res.block_size} sublayers"
        return _encodable(
            f"{self.stored.model.num_layers} layers, {mode}; {self.tokens:,} tokens of "
            f"{self.origin}"
        )


def measurement_json(subject: Subject, measurement: Measurement) -> dict[str, Any]:
    """Everything that was measured, by layer and source, with names and definitions."""
    stored, magnitudes = subject.stored, measurement.magnitudes
    attn_res = stored.model.attn_res
    return {
        "run": stored.given,
        "checkpoint": str(stored.folder),
        "iteration": stored.iteration,
        "trained_tokens": stored.tokens,
        "mode": attn_res.mode,
        "block_size": None if attn_res.mode == "baseline" else attn_res.block_size,
        "cumulative_sources": attn_res.sources == "cumulative",
        "text": {"origin": subject.origin, "tokens": measurement.tokens},
        "definitions": DEFINITIONS,
        "sources": [source.name for source in magnitudes.layout.sources],
        "readers": None if measurement.weights is None else _readers(measurement.weights),
        "magnitudes": {
            "output": magnitudes.output.tolist(),
            "gradient": None if magnitudes.gradient is None else magnitudes.gradient.tolist(),
            "loss": magnitudes.loss,
            "predictions": magnitudes.predictions,
        },
    }


def token_weights_json(subject: Subject, weights: TokenWeights, texts: list[str]) -> dict[str, Any]:
    """The weights of each token: for every reader and source a list over the tokens."""
    layout = weights.layout
    return {
        "run": subject.stored.given,
        "checkpoint": str(subject.stored.folder),
        "definitions": {name: DEFINITIONS[name] for name in ("weight", "source")},
        "tokens": [
            {"id": id_, "text": text} for id_, text in zip(weights.tokens, texts, strict=True)
        ],
        "sources": [source.name for source in layout.sources],
        "readers": [
            _reader(layout, reader)
            | {"weights": _by_source(layout, [_rounded(source) for source in own])}
            for reader, own in zip(layout.readers, weights.weights, strict=True)
        ],
    }


def _encodable(text: str) -> str:
    """A path may hold bytes that are no text."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _readers(weights: DepthWeights) -> list[dict[str, Any]]:
    layout = weights.layout
    return [
        _reader(layout, reader) | {"weights": _by_source(layout, mean.tolist())}
        for reader, mean in zip(layout.readers, weights.mean, strict=True)
    ]


def _reader(layout: DepthLayout, reader: Reader) -> dict[str, Any]:
    """``layer`` from 1; for the head ``layer`` is null and ``sublayer`` is ``head``."""
    partial = layout.sources[reader.sources - 1].name if reader.reads_partial else None
    return {
        "layer": reader.layer,
        "sublayer": reader.sublayer or HEAD,
        "partial": partial,
    }


def _by_source(layout: DepthLayout, values: list[Any]) -> dict[str, Any]:
    return {source.name: value for source, value in zip(layout.sources, values, strict=False)}


def _rounded(values: np.ndarray) -> list[float]:
    """To six places, which is what the pages show and more."""
    return [round(float(value), 6) for value in values]
