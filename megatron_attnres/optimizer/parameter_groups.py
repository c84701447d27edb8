"""Which parameters take weight decay."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

ParameterGroup = dict[str, Any]


def unique_named_parameters(
    chunks: Sequence[torch.nn.Module],
) -> list[tuple[str, torch.nn.Parameter]]:
    """The trainable parameters of a rank's chunks, each once, named `<chunk>.<name>`.

    A parameter that two modules share (tied embeddings on one rank) keeps its first name.
    """
    named = torch.nn.ModuleList(chunks).named_parameters()
    return [(name, param) for name, param in named if param.requires_grad]


def takes_weight_decay(param: torch.nn.Parameter) -> bool:
    """Matrices do; norms, biases, pseudo-queries and key norms, being vectors, do not.

    A matrix opts out with `param.no_weight_decay = True`.
    """
    return param.dim() > 1 and not getattr(param, "no_weight_decay", False)


def parameter_groups(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], weight_decay: float
) -> list[ParameterGroup]:
    """Two groups, decayed and not decayed, in this order on every rank; either may be empty.

    Args:
        named_parameters: as `Module.named_parameters` gives them; repeats are dropped.
        weight_decay: of the first group.

    Returns:
        Groups for a torch optimizer. `wd_mult` is what Megatron-Core's scheduler multiplies
        the weight decay by.
    """
    decayed: dict[torch.nn.Parameter, None] = {}
    not_decayed: dict[torch.nn.Parameter, None] = {}
    for _, param in named_parameters:
        (decayed if takes_weight_decay(param) else not_decayed)[param] = None
    return [
        {"params": list(decayed), "weight_decay": weight_decay, "wd_mult": 1.0},
        {"params": list(not_decayed), "weight_decay": 0.0, "wd_mult": 0.0},
    ]
