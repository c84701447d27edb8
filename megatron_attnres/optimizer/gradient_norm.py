"""The global gradient norm: one number for the whole model, whatever its layout."""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

# The denominator of torch.nn.utils.clip_grad_norm_ and of DeepSpeed's clipping.
CLIP_EPSILON = 1e-6


def counts_in_norm(param: torch.nn.Parameter, tensor_parallel_rank: int) -> bool:
    """Whether this rank counts the parameter, so that over all ranks each counts once.

    Tensor-parallel shards (Megatron's `param.tensor_model_parallel`) count on every rank,
    replicas on the first only. The last stage's copy of a tied embedding is marked
    `param.shared_copy` and does not count.
    """
    if getattr(param, "shared_copy", False):
        return False
    return getattr(param, "tensor_model_parallel", False) or tensor_parallel_rank == 0


def global_gradient_norm(
    gradients: Iterable[tuple[torch.nn.Parameter, torch.Tensor]],
    tensor_parallel_rank: int,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> float:
    """L2 norm over all gradients of the model, accumulated in float64.

    Every rank of the groups must call it; all get the same number. Float64 makes the order of
    additions, which is all that a layout changes, invisible at the precision of the gradients.

    Args:
        gradients: this rank's parameters with their finished gradients, averaged over
            data-parallel ranks, or with the slices of them that this rank owns.
        tensor_parallel_rank: rank among the holders of replicas.
        groups: process groups over which the ranks' shares add up, one after the other.
        device: where the collective runs.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for param, gradient in gradients:
        if counts_in_norm(param, tensor_parallel_rank):
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
            squares += norm.to(device).square()
    for group in groups:
        dist.all_reduce(squares, group=group)
    return math.sqrt(squares.item())


def clip_factor(norm: float, clip_grad: float) -> float:
    """What to multiply the gradients by so that their norm is at most `clip_grad` (0: any)."""
    if clip_grad == 0.0:
        return 1.0
    return min(1.0, clip_grad / (norm + CLIP_EPSILON))
