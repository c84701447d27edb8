"""Weights without a model, for tests of what draws and writes them."""

import numpy as np

from megatron_attnres.analysis.depth.layout import layout_of
from megatron_attnres.analysis.depth.records import Magnitudes, Measurement, TokenWeights
from tests.layouts import small_model

# Texts that mean something to HTML, JavaScript, JSON, matplotlib or Plotly, and some that few
# fonts have.
NASTY = [
    "</script>",
    "<!--",
    '"',
    "'",
    "&amp;",
    "\\u2028",
    "\u2028",
    "\x00",
    "\x1b[31m",
    "<b>bold</b>",
    "<img src=x onerror=alert(1)>",
    "$x^2",
    "$",
    "%{z}",
    "${token}",
    "`",
    "中文",
    "🙂",
    "\ud800",
    "a" * 200,
]


def token_weights(
    layers: int, mode: str, block_size: int, tokens: int, seed: int = 0
) -> TokenWeights:
    """Random weights of every reader and token."""
    layout = layout_of(small_model(num_layers=layers, mode=mode, block_size=block_size))
    random = np.random.default_rng(seed)
    weights = []
    for reader in layout.readers:
        logits = np.exp(random.normal(size=(reader.sources, tokens)))
        weights.append((logits / logits.sum(axis=0)).astype(np.float32))
    return TokenWeights(layout, tuple(range(tokens)), tuple(weights))


def measurement_of(weights: TokenWeights) -> Measurement:
    """The means over the tokens, and random magnitudes."""
    random = np.random.default_rng(1)
    layout = weights.layout
    output, gradient = random.uniform(1, 2, (2, layout.layers))
    count = len(weights.tokens)
    return Measurement(count, weights.mean(), Magnitudes(layout, output, gradient, 2.5, count - 1))
