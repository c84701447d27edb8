"""Hidden dropout whose masks depend on seed, sample and sublayer alone.

Megatron draws masks from generators that every rank advances, forks by tensor rank and saves: its
masks change with the layout. Here a mask is a function of what it is for. Any layout, a recomputed
layer and a resumed run drop the same activations, and no generator's state outlives a call.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_attnres.parallel.parameters import seed_of

EMBEDDING = -1
"""Stands for the embedding where sublayers are counted from 0."""


@dataclass(frozen=True)
class HiddenDropout:
    """Dropout of one micro-batch on one rank.

    Attributes:
        probability: of an activation to be dropped.
        seed: of the run.
        samples: the micro-batch's samples by their place in the data order, one per row.
        shard, num_shards: which part of the sequence this rank has; under sequence parallelism its
            tensor rank and TP.
    """

    probability: float
    seed: int
    samples: tuple[int, ...]
    shard: int = 0
    num_shards: int = 1

    def drop(self, hidden: Tensor, sublayer: int) -> Tensor:
        """Set some activations to 0 and scale the others up, so that the mean stays.

        Args:
            hidden: [s, b, h] ([s / TP, b, h] under sequence parallelism).
            sublayer: whose output it is, counted over the whole model; or ``EMBEDDING``.

        Returns:
            Of hidden's shape.
        """
        rows, _, width = hidden.shape
        masks = [
            self._dropped(sample, sublayer, rows, width, hidden.device) for sample in self.samples
        ]
        # A boolean mask is all that backward keeps.
        return hidden.masked_fill(torch.stack(masks, dim=1), 0.0) / (1 - self.probability)

    def _dropped(
        self, sample: int, sublayer: int, rows: int, width: int, device: torch.device
    ) -> Tensor:
        """Where this rank drops activations of one sample, [rows, h].

        The whole sequence is drawn and the rank's part kept. The device draws, for speed; CPU and
        CUDA draw different numbers.
        """
        seed = seed_of(f"dropout:{sample}:{sublayer}", self.seed)
        generator = torch.Generator(device).manual_seed(seed)
        shape = (rows * self.num_shards, width)
        drawn = torch.rand(shape, generator=generator, dtype=torch.float32, device=device)
        return drawn[self.shard * rows : (self.shard + 1) * rows] < self.probability
