"""Where a parameter's gradient is summed over the micro-batches of a step.

Under fp32 (and fp64) that is `param.grad`, as everywhere in PyTorch. Under bf16 it is
`param.main_grad`, Megatron's name for a float32 sum: bf16 keeps 8 bits, so a sum of many
micro-batches kept in bf16 stops growing as soon as an addend is below 1/256 of it.
"""

from collections.abc import Iterable

import torch


def main_gradient(param: torch.nn.Parameter) -> torch.Tensor | None:
    """The gradient summed so far in this step, or None if the parameter has received none.

    Valid between a backward pass and the optimizer's `step()`. Whoever changes it in place
    (tied embeddings, sequence parallelism) changes what the optimizer will use.

    Returns:
        A tensor of the parameter's shape: float32 under bf16, else the parameter's data type.
    """
    return param.main_grad if _has_main_grad(param) else param.grad


def accumulate_in_fp32(parameters: Iterable[torch.nn.Parameter]) -> None:
    """From now on, every backward pass adds to a float32 `main_grad` and drops `grad`."""
    for param in parameters:
        if not _has_main_grad(param):
            param.main_grad = None
            param.register_post_accumulate_grad_hook(_add_to_main_grad)


def fill_missing_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Give a gradient of zeros to every parameter that received none in this step.

    Data-parallel ranks must reduce the same tensors in the same order. A parameter that one
    rank's micro-batches did not reach would otherwise shift all that follow, or hang the job.
    Its moments decay and its weight decay applies, with ZeRO and without.
    """
    for param in parameters:
        if main_gradient(param) is not None:
            continue
        if _has_main_grad(param):
            param.main_grad = torch.zeros_like(param, dtype=torch.float32)
        else:
            param.grad = torch.zeros_like(param)


def clear_main_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Forget this step's gradients."""
    for param in parameters:
        param.grad = None
        if _has_main_grad(param):
            param.main_grad = None


def _has_main_grad(param: torch.nn.Parameter) -> bool:
    return hasattr(param, "main_grad")


def _add_to_main_grad(param: torch.nn.Parameter) -> None:
    if param.main_grad is None:
        param.main_grad = param.grad.to(torch.float32)
    else:
        param.main_grad.add_(param.grad)
    param.grad = None
