"""What a training step needs of an optimizer, whether its state is sharded or not."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

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


class TrainingOptimizer(Protocol):
    """AdamW over one rank's parameters. Every method is called by all ranks together."""

    @property
    def param_groups(self) -> list[ParameterGroup]:
        """Groups whose `lr` and `weight_decay` a scheduler may set."""
        ...

    def step(self) -> StepReport:
        """Average gradients over data-parallel ranks, clip, update, clear gradients."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for a resume in the same layout: plain containers and tensors.

        `torch.load(..., weights_only=True)` reads it. The tensors are the live ones: save or
        copy them before the next step.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; model parameters follow the master weights in it."""
        ...

    def optimizer_state_fraction(self) -> float:
        """Optimizer state (moments, master weights) held here over that of one whole replica."""
        ...
