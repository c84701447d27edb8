"""Finishing gradients across model-parallel ranks, after the last backward and before the step.

Data-parallel averaging is the optimizer's business (optimizer/); what is summed here are the parts
of one gradient that tensor- and pipeline-parallel ranks hold.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, distributed, nn

from megatron_attnres.parallel.parameters import has_partial_gradient, is_tied_across_stages

GradientOf = Callable[[Tensor], Tensor | None]


def finish_gradients(
    chunks: Sequence[nn.Module], groups: ProcessGroupCollection, gradient_of: GradientOf
) -> None:
    """Sum what model-parallel ranks hold of the same parameter's gradient, in place.

    Collective over the tensor-parallel and the embedding group.

    Args:
        chunks: this rank's chunks.
        groups: tp and embd are used.
        gradient_of: where a parameter's accumulated gradient lies.
    """
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    if groups.tp.size() > 1:
        _sum_over(groups.tp, filter(has_partial_gradient, parameters), gradient_of)
    tied = [parameter for parameter in parameters if is_tied_across_stages(parameter)]
    if tied:
        _sum_over(groups.embd, tied, gradient_of)


def _sum_over(
    group: distributed.ProcessGroup, parameters: Iterable[Tensor], gradient_of: GradientOf
) -> None:
    """All-reduce the gradients of some parameters as one flat tensor."""
    gradients = [gradient for p in parameters if (gradient := gradient_of(p)) is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat, group=group)
    for gradient, summed in zip(
        gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(summed.view_as(gradient))
