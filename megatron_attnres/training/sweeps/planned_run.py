"""One run of a sweep, as plain data. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PlannedRun:
    """What a run will be, before it starts.

    Attributes:
        name: of its folder below the sweep's; unique in the sweep.
        size: its name in the grid.
        curve: what is compared: ``baseline``, ``block4`` (4 blocks), ``full``.
        learning_rate: the highest.
        seed: of weights and data order.
        parameters: of the whole model.
        non_embedding_parameters: without the embedding and the output layer.
        tokens: trained on, whole iterations.
        train_iters: iterations.
        flops: of the whole training, as model/flops.py counts.
        flags: of pretrain_attnres.py, by name without the dashes, as ``--config`` takes them; those
            that the launcher adds (``run-dir``, ``load`` and the like) are not among them.
    """

    name: str
    size: str
    curve: str
    learning_rate: float
    seed: int
    parameters: int
    non_embedding_parameters: int
    tokens: int
    train_iters: int
    flops: int
    flags: Mapping[str, Any]
