"""The numbers of a correspondence, from the folder's tensors to ours and back. Exact."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_attnres.interop.names import Correspondence


def joined(parts: Sequence[Tensor], correspondence: Correspondence) -> Tensor:
    """Our tensor.

    Args:
        parts: the folder's tensors in the correspondence's order, of its shapes and one data type.
        correspondence: of them.
    """
    ours, groups = correspondence.ours, correspondence.groups
    grouped = [part.reshape(groups, -1, ours.shape[-1]) for part in parts]
    return torch.cat(grouped, dim=1).reshape(ours.shape)


def split(tensor: Tensor, correspondence: Correspondence) -> list[Tensor]:
    """The folder's tensors, contiguous, no two of which share memory.

    Args:
        tensor: ours, contiguous.
        correspondence: of it.
    """
    groups, width = correspondence.groups, tensor.shape[-1]
    if len(correspondence.theirs) == 1:
        return [tensor.reshape(correspondence.theirs[0].shape)]
    rows = [part.numel // (groups * width) for part in correspondence.theirs]
    parts = tensor.reshape(groups, -1, width).split(rows, dim=1)
    return [
        part.clone(memory_format=torch.contiguous_format).reshape(theirs.shape)
        for part, theirs in zip(parts, correspondence.theirs, strict=True)
    ]
