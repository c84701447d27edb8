"""Stage 0: every data-parallel rank holds the whole optimizer state. For comparison with ZeRO."""

from collections.abc import Sequence

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_attnres.optimizer.adamw import (
    build_adamw,
    ensure_state,
    flat_state,
    set_steps,
    steps_of,
)
from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.optimizer.data_parallel_mean import average_over_data_parallel_ranks
from megatron_attnres.optimizer.gradient_norm import clip_factor, global_gradient_norm
from megatron_attnres.optimizer.main_gradients import (
    clear_main_gradients,
    fill_missing_gradients,
    main_gradient,
)
from megatron_attnres.optimizer.parameter_groups import ParameterGroup
from megatron_attnres.optimizer.training_optimizer import StateSlice, StepReport, step_report


class ReplicatedOptimizer:
    """AdamW on this rank's whole parameters, or on their float32 masters under bf16."""

    def __init__(
        self,
        parameter_groups: Sequence[ParameterGroup],
        config: OptimizerConfig,
        groups: ProcessGroupCollection,
    ) -> None:
        self._config = config
        self._groups = groups
        self._parameters = [param for group in parameter_groups for param in group["params"]]
        self._masters = {param: _master_weight(param) for param in self._parameters}
        master_groups = [
            group | {"params": [self._masters[param] for param in group["params"]]}
            for group in parameter_groups
        ]
        self._device = self._parameters[0].device
        self._adamw = build_adamw(master_groups, config, self._device)

    @property
    def param_groups(self) -> list[ParameterGroup]:
        """See TrainingOptimizer."""
        return self._adamw.param_groups

    def step(self) -> StepReport:
        """See TrainingOptimizer."""
        fill_missing_gradients(self._parameters)
        gradients = [main_gradient(param) for param in self._parameters]
        average_over_data_parallel_ranks(gradients, self._groups.dp_cp)
        norm = global_gradient_norm(
            zip(self._parameters, gradients, strict=True),
            tensor_parallel_rank=self._groups.tp.rank(),
            groups=[self._groups.mp],
            device=self._device,
        )
        report = step_report(norm, self._config.clip_grad)
        if not report.skipped:
            if report.clipped:
                torch._foreach_mul_(gradients, clip_factor(norm, self._config.clip_grad))
            self._update(gradients)
        clear_main_gradients(self._parameters)
        return report

    def state_slices(self) -> list[StateSlice]:
        """See TrainingOptimizer."""
        ensure_state(self._adamw)
        return [
            StateSlice(
                param,
                0,
                param.numel(),
                self._groups.dp_cp.size(),
                flat_state(self._adamw, master),
            )
            for param, master in self._masters.items()
        ]

    @property
    def steps(self) -> int:
        """See TrainingOptimizer."""
        return steps_of(self._adamw)

    def continue_from(self, steps: int) -> None:
        """See TrainingOptimizer."""
        set_steps(self._adamw, steps)
        self._copy_masters_to_parameters()

    def optimizer_state_fraction(self) -> float:
        """See TrainingOptimizer."""
        return 1.0

    def _update(self, gradients: Sequence[torch.Tensor]) -> None:
        for master, gradient in zip(self._masters.values(), gradients, strict=True):
            master.grad = gradient
        self._adamw.step()
        self._adamw.zero_grad()
        self._copy_masters_to_parameters()

    @torch.no_grad()
    def _copy_masters_to_parameters(self) -> None:
        for param, master in self._masters.items():
            if master is not param:
                param.copy_(master)


def _master_weight(param: torch.nn.Parameter) -> torch.nn.Parameter:
    """What AdamW updates: the parameter itself, or a float32 copy of a bf16 one."""
    if param.dtype != torch.bfloat16:
        return param
    return torch.nn.Parameter(param.detach().to(torch.float32, copy=True))
