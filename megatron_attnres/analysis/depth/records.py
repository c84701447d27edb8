"""What is measured of a trained model over a text, as plain data. No torch.

Definitions, which every written file repeats (``DEFINITIONS``), are the paper's where it has
them: weights as in its figure 8, magnitudes as in its figure 5 (arXiv:2603.15031).
"""

from dataclasses import dataclass

import numpy as np

from megatron_attnres.analysis.depth.layout import DepthLayout, Sublayer

DEFINITIONS = {
    "weight": "p_i = softmax_i(w . RMSNorm(v_i; g)), with the recency bias if the model has one, "
    "of a reader (the depth attention before a self-attention, an MLP or the output head) over its "
    "sources v_i; a token's weights of one reader sum to 1. Mean weights are over all tokens of "
    "the text.",
    "source": "the token embedding and every completed block summary (in full mode every "
    "sublayer's output), oldest first; of cumulative sources, the running hidden state at the "
    "block's end. A block's partial sum is counted in the block's column and marked as partial.",
    "output magnitude": "root mean square, over tokens and channels, of the running state after a "
    "layer: the residual stream of a baseline; otherwise the newest source, which is what the "
    "layer's block has summed up so far.",
    "gradient magnitude": "root mean square, over tokens and channels, of d loss / d that state; "
    "loss is the mean next-token loss over the text (so that the magnitude falls as one over the "
    "number of tokens).",
}


@dataclass(frozen=True)
class DepthWeights:
    """Mean weights of every reader.

    Attributes:
        layout: of the model; not a baseline's.
        mean: of each reader, float64 [its sources]; sums to 1.
    """

    layout: DepthLayout
    mean: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class TokenWeights:
    """Weights of every reader for each token of a short text.

    Attributes:
        layout: of the model; not a baseline's.
        tokens: their ids.
        weights: of each reader, float32 [its sources, tokens]; a column sums to 1.
    """

    layout: DepthLayout
    tokens: tuple[int, ...]
    weights: tuple[np.ndarray, ...]

    def at(self, token: int) -> DepthWeights:
        """Of one token."""
        return DepthWeights(
            self.layout, tuple(one[:, token].astype(np.float64) for one in self.weights)
        )

    def mean(self) -> DepthWeights:
        """Over the tokens."""
        return DepthWeights(
            self.layout, tuple(one.mean(axis=1, dtype=np.float64) for one in self.weights)
        )


@dataclass(frozen=True)
class Magnitudes:
    """Output and gradient magnitude after every layer (``DEFINITIONS``).

    Attributes:
        layout: of the model.
        output: float64 [layers].
        gradient: float64 [layers]; None where no token has a next one.
        loss: mean next-token loss, nats; None where no token has a next one.
        predictions: tokens that have a next one.
    """

    layout: DepthLayout
    output: np.ndarray
    gradient: np.ndarray | None
    loss: float | None
    predictions: int

    @property
    def block_ends(self) -> tuple[int, ...]:
        """Layers (from 1) in which a block ends; none where blocks end in all of them."""
        ends = self.layout.block_ends
        return ends if len(ends) < self.layout.layers else ()


@dataclass(frozen=True)
class Measurement:
    """A text's means.

    Attributes:
        tokens: read.
        weights: None for a baseline, or where they were left out.
        magnitudes: after every layer.
    """

    tokens: int
    weights: DepthWeights | None
    magnitudes: Magnitudes

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are."""
        own = self.magnitudes
        optional = [one for one in (own.gradient, own.loss) if one is not None]
        weights = () if self.weights is None else self.weights.mean
        return all(np.isfinite(one).all() for one in (own.output, *optional, *weights))


def table_of(weights: DepthWeights, sublayer: Sublayer) -> np.ndarray:
    """Weights as a table, float64 [layers + 1, sources]; NaN where a reader has no source.

    Row i is layer i + 1's reader of that kind, the last row is the head's.
    """
    layout = weights.layout
    table = np.full((layout.layers + 1, len(layout.sources)), np.nan)
    for row, (place, reader) in enumerate(layout.of(sublayer)):
        table[row, : reader.sources] = weights.mean[place]
    return table


def partial_cells(layout: DepthLayout, sublayer: Sublayer) -> list[tuple[int, int]]:
    """The (row, column) of ``table_of`` that hold the weight of a partial sum."""
    return [
        (row, reader.sources - 1)
        for row, (_, reader) in enumerate(layout.of(sublayer))
        if reader.reads_partial
    ]


def strongest(weights: TokenWeights, sublayer: Sublayer) -> tuple[np.ndarray, np.ndarray]:
    """Which source has the largest weight, int [layers + 1, tokens], and that weight."""
    own = [weights.weights[place] for place, _ in weights.layout.of(sublayer)]
    return np.stack([one.argmax(axis=0) for one in own]), np.stack([one.max(axis=0) for one in own])
