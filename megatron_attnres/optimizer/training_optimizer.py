"""What a training step needs of an optimizer, whether its state is sharded or not."""

from dataclasses import dataclass
from typing import Any, Protocol

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
        """This rank's state: plain containers and tensors, for a resume in the same layout."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; model parameters follow the master weights in it."""
        ...

    def optimizer_state_fraction(self) -> float:
        """Optimizer state (moments, master weights) held here over that of one whole replica."""
        ...
