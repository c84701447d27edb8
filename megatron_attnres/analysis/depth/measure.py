"""Runs a trained model over a text and collects what ``records`` defines.

One process that holds the whole model. Memory does not grow with the text: sums are kept in float64
and only one batch's activations live at a time.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_attnres.analysis.depth.layout import DepthLayout
from megatron_attnres.analysis.depth.observers import watching_layers, watching_weights
from megatron_attnres.analysis.depth.records import (
    DepthWeights,
    Magnitudes,
    Measurement,
    TokenWeights,
)
from megatron_attnres.analysis.depth.windows import NO_LABEL, Window, batches_of
from megatron_attnres.model.gpt import GPTChunk


def measure(
    module: GPTChunk,
    layout: DepthLayout,
    windows: Iterable[Window],
    batch_size: int,
    with_weights: bool = True,
) -> Measurement:
    """Mean weights and magnitudes over a text.

    Args:
        module: the whole model, in evaluation mode; its parameters get no gradients.
        layout: of the same model.
        windows: the text, each of at most the model's context; at least one.
        batch_size: windows that are computed together.
        with_weights: False leaves them out; of a baseline there are none.
    """
    sums = _Sums(layout, with_weights and bool(layout.readers))
    for batch in batches_of(windows, batch_size):
        sums.add(module, batch)
    return sums.measurement()


def weights_of_tokens(module: GPTChunk, layout: DepthLayout, tokens: Sequence[int]) -> TokenWeights:
    """The weights of every reader for each token of one text.

    Args:
        module: the whole model, no baseline, in evaluation mode.
        layout: of the same model.
        tokens: ids, from 1 to the model's context of them.
    """
    found: list[np.ndarray] = []
    ids = _tensor(np.asarray(tokens, dtype=np.int64)[None], module)
    with (
        torch.no_grad(),
        watching_weights(module, lambda _, p: found.append(p[:, :, 0].float().cpu().numpy())),
    ):
        module(ids, None, ids)
    return TokenWeights(layout, tuple(int(one) for one in tokens), tuple(found))


class _Sums:
    """Of the batches so far, in float64."""

    def __init__(self, layout: DepthLayout, with_weights: bool) -> None:
        self._layout = layout
        self._with_weights = with_weights
        self._tokens = self._predictions = self._channels = 0
        self._loss = 0.0
        self._weights = [np.zeros(reader.sources) for reader in layout.readers]
        self._output = np.zeros(layout.layers)
        self._gradient = np.zeros(layout.layers)

    def add(self, module: GPTChunk, batch: Sequence[Window]) -> None:
        tokens = np.stack([window.tokens for window in batch])
        labels = np.stack([window.labels for window in batch])
        states: list[Tensor] = []
        with torch.enable_grad(), watching_layers(module, states.append):
            losses = self._run(module, tokens, np.maximum(labels, 0))
            # A sum: what it is to be divided by is known when the text has ended.
            loss = losses[_tensor(labels, module) != NO_LABEL].double().sum()
            gradients = torch.autograd.grad(loss, states)
        for layer, (state, gradient) in enumerate(zip(states, gradients, strict=True)):
            self._output[layer] += _square_sum(state)
            self._gradient[layer] += _square_sum(gradient)
        self._loss += loss.item()
        self._tokens += tokens.size
        self._predictions += int((labels != NO_LABEL).sum())
        self._channels = states[0].shape[-1]

    def measurement(self) -> Measurement:
        values, predictions = self._tokens * self._channels, self._predictions
        weights = None
        if self._with_weights:
            mean = tuple(one / self._tokens for one in self._weights)
            weights = DepthWeights(self._layout, mean)
        magnitudes = Magnitudes(
            self._layout,
            np.sqrt(self._output / values),
            np.sqrt(self._gradient / values) / predictions if predictions else None,
            self._loss / predictions if predictions else None,
            predictions,
        )
        return Measurement(self._tokens, weights, magnitudes)

    def _run(self, module: GPTChunk, tokens: np.ndarray, labels: np.ndarray) -> Tensor:
        """The loss of every token, [b, s]; adds up the weights on the way."""
        arguments = _tensor(tokens, module), None, _tensor(labels, module)
        if not self._with_weights:
            return module(*arguments)
        with watching_weights(module, self._add_weights):
            return module(*arguments)

    def _add_weights(self, reader: int, weights: Tensor) -> None:
        self._weights[reader] += weights.sum(dim=(1, 2), dtype=torch.float64).cpu().numpy()


def _square_sum(tensor: Tensor) -> float:
    norm = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
    return norm.square().item()


def _tensor(ids: np.ndarray, module: GPTChunk) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(ids)).to(module.rotary_cosines.device)
