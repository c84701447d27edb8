"""What a training step needs of an optimizer, whether its state is sharded or not."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_attnres.optimizer.gradient_norm import clip_factor
from megatron_attnres.optimizer.parameter_groups import ParameterGroup


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step saw.

    Attributes:
        grad_norm: global L2 norm before clipping; the same on every rank.
        clipped: the gradients were scaled down.
        skipped: the norm was not finite; weights and moments are untouched.
    """

    grad_norm: float
    clipped: bool
    skipped: bool


def step_report(grad_norm: float, clip_grad: float) -> StepReport:
    """The report of a step whose gradients have this norm, and so what the step is to do."""
    skipped = not math.isfinite(grad_norm)
    clipped = not skipped and clip_factor(grad_norm, clip_grad) < 1.0
    return StepReport(grad_norm=grad_norm, clipped=clipped, skipped=skipped)


@dataclass(frozen=True)
class StateSlice:
    """State of a stretch of one parameter, flattened.

    Attributes:
        parameter: the model's.
        start, stop: the stretch, in elements of the flattened parameter.
        replicas: data-parallel ranks that hold the same.
        tensors: `master`, `exp_avg` and `exp_avg_sq`, float32 (or wider) [stop - start], views of
            the live ones.
    """

    parameter: torch.nn.Parameter
    start: int
    stop: int
    replicas: int
    tensors: dict[str, torch.Tensor]


class TrainingOptimizer(Protocol):
    """AdamW over one rank's parameters. Every method is called by all ranks together."""

    @property
    def param_groups(self) -> list[ParameterGroup]:
        """Groups whose `lr` and `weight_decay` a scheduler may set."""
        ...

    def step(self) -> StepReport:
        """Average gradients over data-parallel ranks, clip, update, clear gradients."""
        ...

    def state_slices(self) -> list[StateSlice]:
        """Where this rank keeps the state of its parameters; there from the start, as zeros."""
        ...

    @property
    def steps(self) -> int:
        """Updates done, skipped ones excluded: AdamW's t."""
        ...

    def continue_from(self, steps: int) -> None:
        """Go on after so many updates: someone has written master weights and moments in place.

        Model parameters follow the master weights.
        """
        ...

    def optimizer_state_fraction(self) -> float:
        """Optimizer state (moments, master weights) held here over that of one whole replica."""
        ...
