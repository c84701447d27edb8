"""From a rank's model chunks and a configuration to the optimizer that trains them."""

from collections.abc import Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_attnres.errors import InputError
from megatron_attnres.optimizer.configuration import DATA_TYPES, OptimizerConfig
from megatron_attnres.optimizer.deepspeed_runtime import start_deepspeed
from megatron_attnres.optimizer.main_gradients import accumulate_in_fp32
from megatron_attnres.optimizer.parameter_groups import parameter_groups, unique_named_parameters
from megatron_attnres.optimizer.replicated import ReplicatedOptimizer
from megatron_attnres.optimizer.training_optimizer import TrainingOptimizer


def build_optimizer(
    chunks: Sequence[torch.nn.Module], config: OptimizerConfig, groups: ProcessGroupCollection
) -> TrainingOptimizer:
    """AdamW with or without ZeRO for the parameters of this rank's chunks.

    Call it before the first backward pass: under bf16 it starts the float32 accumulation of
    gradients. With ZeRO the parameters become views of one flat buffer per group; the Parameter
    objects, their attributes and ties stay.

    Args:
        chunks: this rank's virtual stages, all parameters in `config.precision`, equal on
            data-parallel ranks.
        config: see OptimizerConfig.
        groups: with at least tp, mp and dp_cp.

    Raises:
        InputError: flags that do not go together or with this host.
        ValueError: a parameter of another data type, or no parameters at all.
    """
    check_zero_flags(config)
    named = unique_named_parameters(chunks)
    _check_data_types(named, config)
    decay_groups = parameter_groups(named, config.weight_decay)
    if config.precision == "bf16":
        accumulate_in_fp32(param for _, param in named)
    if config.zero_stage == 0:
        return ReplicatedOptimizer(decay_groups, config, groups)
    # DeepSpeed takes seconds to import; stage 0 does without.
    start_deepspeed()
    from megatron_attnres.optimizer.zero import ZeroOptimizer

    names = {param: name for name, param in named}
    return ZeroOptimizer(decay_groups, names, config, groups)


def check_zero_flags(config: OptimizerConfig) -> None:
    """Refuse what ZeRO cannot do, before anything is built.

    Raises:
        InputError: names the flag, its value and what is allowed.
    """
    if config.zero_stage == 1 and config.precision == "fp64":
        raise InputError("--zero-stage 1 with --precision fp64: master weights are fp32; use 0")
    if not config.zero_cpu_offload:
        return
    if config.zero_stage != 1:
        raise InputError(f"--zero-cpu-offload with --zero-stage {config.zero_stage}: needs 1")
    if not torch.cuda.is_available():
        raise InputError("--zero-cpu-offload on a host without accelerator: leave the flag out")


def _check_data_types(
    named: Sequence[tuple[str, torch.nn.Parameter]], config: OptimizerConfig
) -> None:
    if not named:
        raise ValueError("this rank's chunks have no trainable parameters")
    for name, param in named:
        if param.dtype != getattr(torch, DATA_TYPES[config.precision]):
            raise ValueError(f"{name} is {param.dtype} in a model of precision {config.precision}")
