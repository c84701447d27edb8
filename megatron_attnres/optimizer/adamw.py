"""AdamW: PyTorch's fused one, or NVIDIA Apex's where it is installed."""

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.optimizer.parameter_groups import ParameterGroup


def build_adamw(
    groups: Sequence[ParameterGroup], config: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW whose update will run on `device`."""
    arguments = {
        "lr": config.lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
    }
    if device.type == "cuda" and config.precision != "fp64" and apex_is_installed():
        from apex.optimizers import FusedAdam

        return FusedAdam(list(groups), adam_w_mode=True, **arguments)
    return torch.optim.AdamW(list(groups), fused=device.type in ("cpu", "cuda"), **arguments)


def apex_is_installed() -> bool:
    """Whether `apex` is NVIDIA's and was built with its CUDA extensions.

    The package index has an unrelated package of this name; only NVIDIA's has the compiled
    module amp_C beside it and apex.optimizers inside.
    """
    return all(_module_exists(name) for name in ("amp_C", "apex", "apex.optimizers"))


def adamw_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Moments and step counts, without hyperparameters: those are the configuration's."""
    state = optimizer.state_dict()
    # Apex counts steps in its groups, PyTorch per parameter.
    steps = [group.get("step") for group in state["param_groups"]]
    return {"state": state["state"], "group_steps": steps}


def load_adamw_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Set moments and step counts from `adamw_state()`; keep the present hyperparameters.

    Raises:
        ValueError: the number of groups differs.
    """
    groups = optimizer.state_dict()["param_groups"]
    for group, step in zip(groups, saved["group_steps"], strict=True):
        if step is not None:
            group["step"] = step
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent that is not a package
        return False
