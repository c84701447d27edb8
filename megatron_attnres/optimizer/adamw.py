"""AdamW: PyTorch's fused one, or NVIDIA Apex's where it is installed."""

import importlib.util
from collections.abc import Sequence

import torch

from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.optimizer.parameter_groups import ParameterGroup

MOMENTS = ("exp_avg", "exp_avg_sq")


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


def ensure_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the moments and step counts that the first step would make."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if optimizer.state[param]:
                continue
            state = {name: torch.zeros_like(param, requires_grad=False) for name in MOMENTS}
            if isinstance(optimizer, torch.optim.AdamW):
                # PyTorch counts steps per parameter, beside it; Apex in its groups.
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            optimizer.state[param] = state


def flat_state(optimizer: torch.optim.Optimizer, master: torch.Tensor) -> dict[str, torch.Tensor]:
    """A master weight and its moments by name, flattened views of the live ones."""
    moments = {name: optimizer.state[master][name].view(-1) for name in MOMENTS}
    return {"master": master.detach().view(-1), **moments}


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    """Updates that AdamW has made."""
    for group in optimizer.param_groups:
        if "step" in group:
            return int(group["step"])
        for param in group["params"]:
            return int(optimizer.state[param].get("step", 0))
    return 0


def set_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Let AdamW's bias correction go on after so many updates."""
    ensure_state(optimizer)
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.AdamW):
            for param in group["params"]:
                optimizer.state[param]["step"].fill_(steps)
        else:
            group["step"] = steps


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent that is not a package
        return False
