"""Keys and values of the tokens seen so far, kept for inference."""

from typing import NamedTuple

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of one batch of sequences, for some layers on one tensor-parallel rank.

    Every layer of a step reads and writes at the same ``length``; ``advance`` ends the step.
    Write it without autograd. A cache made under ``torch.inference_mode`` is usable only there.

    Attributes:
        length: positions filled so far, 0 at first. Lowering it forgets the later positions.

    Args:
        layers: global indices of the layers.
        batch_size: b, sequences.
        max_length: positions to make room for.
        groups: key heads of one layer on this rank (groups / TP).
        head_width: d, of keys and of values.
        dtype: of the activations.
        device: of the activations.
    """

    def __init__(
        self,
        layers: range,
        batch_size: int,
        max_length: int,
        groups: int,
        head_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.length = 0
        self.max_length = max_length
        # The layout that torch's attention reads: a step writes its own tokens and moves no other.
        shape = (batch_size, groups, max_length, head_width)
        self._tensors = {
            index: (
                torch.empty(shape, dtype=dtype, device=device),
                torch.empty(shape, dtype=dtype, device=device),
            )
            for index in layers
        }

    def layer(self, index: int) -> "LayerCache":
        """The part of one layer.

        Raises:
            KeyError: the layer is not one of the cache's.
        """
        # Made at every call: kept, the two would refer to each other, and the memory of a dropped
        # cache would wait for Python's cycle collector.
        return LayerCache(self, *self._tensors[index])

    def advance(self, tokens: int) -> None:
        """End a step of that many tokens, after all layers wrote theirs.

        Raises:
            ValueError: the tokens do not fit.
        """
        self.length = self.end_of_step(tokens)

    def end_of_step(self, tokens: int) -> int:
        """Positions filled once that many more tokens are in.

        Raises:
            ValueError: the tokens do not fit.
        """
        end = self.length + tokens
        if end > self.max_length:
            raise ValueError(
                f"a sequence of {end} tokens ({self.length} cached, {tokens} new) does not fit a "
                f"key/value cache of max_length {self.max_length}: make it with max_length {end} "
                "or more"
            )
        return end


class LayerCache(NamedTuple):
    """One layer's part of a ``KeyValueCache``.

    Attributes:
        cache: the whole.
        keys: [b, groups / TP, max_length, d]; positions from ``cache.length`` on are arbitrary.
        values: like keys.
    """

    cache: KeyValueCache
    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        """Positions filled before this step."""
        return self.cache.length

    def write(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put the step's tokens behind those of earlier steps.

        Args:
            key: [s, b, groups / TP, d].
            value: [s, b, groups / TP, d].

        Returns:
            Keys and values of all positions including the step's, views of the cache, each
            [b, groups / TP, length + s, d].

        Raises:
            ValueError: the tokens do not fit.
        """
        start, end = self.length, self.cache.end_of_step(key.shape[0])
        self.keys[:, :, start:end] = key.permute(1, 2, 0, 3)
        self.values[:, :, start:end] = value.permute(1, 2, 0, 3)
        return self.keys[:, :, :end], self.values[:, :, :end]
