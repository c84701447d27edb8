"""Bad values in a real run, before a step's forward or after its backward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from megatron_attnres.pipeline.step import PipelineStep, StepRecord

Act = Callable[[PipelineStep, int], None]
"""Called with this rank's step and the iteration, counted from 1."""


def nothing(step: PipelineStep, iteration: int) -> None:
    """Plants nothing."""


@contextmanager
def planting(before: Act = nothing, after: Act = nothing) -> Iterator[None]:
    """Every training step that runs within it is between these two."""
    original, iteration = PipelineStep.run, 0

    def run(self: PipelineStep, *arguments, forward_only: bool = False, **named) -> StepRecord:
        nonlocal iteration
        if forward_only:
            return original(self, *arguments, forward_only=True, **named)
        iteration += 1
        before(self, iteration)
        record = original(self, *arguments, **named)
        after(self, iteration)
        return record

    with patch.object(PipelineStep, "run", run):
        yield


def parameters_of(step: PipelineStep) -> dict[str, Tensor]:
    """This rank's, by global name."""
    return {
        chunk.module.global_name(name): parameter
        for chunk in step.chunks
        for name, parameter in chunk.module.named_parameters()
    }
