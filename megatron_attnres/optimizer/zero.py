"""Stage 1: DeepSpeed's ZeRO shards optimizer state over data-parallel ranks."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.timer import NoopTimer
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_attnres.optimizer.adamw import (
    build_adamw,
    ensure_state,
    flat_state,
    set_steps,
    steps_of,
)
from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.optimizer.data_parallel_mean import BUCKET_ELEMENTS
from megatron_attnres.optimizer.gradient_norm import global_gradient_norm
from megatron_attnres.optimizer.main_gradients import (
    clear_main_gradients,
    fill_missing_gradients,
)
from megatron_attnres.optimizer.parameter_groups import ParameterGroup
from megatron_attnres.optimizer.training_optimizer import StateSlice, StepReport, step_report


class ZeroOptimizer:
    """AdamW on this rank's 1 / DP of the float32 master weights.

    DeepSpeed's engine is left out: it would run forward and backward, which are the pipeline
    schedule's, and with bf16 it insists on a norm of its own. Its ZeRO optimizer is used
    directly, as DeepSpeed's pipeline engine uses it: backward elsewhere, then
    `reduce_gradients(pipeline_parallel=True)` and `step()`.
    """

    def __init__(
        self,
        parameter_groups: Sequence[ParameterGroup],
        parameter_names: Mapping[torch.nn.Parameter, str],
        config: OptimizerConfig,
        groups: ProcessGroupCollection,
    ) -> None:
        # DeepSpeed reads the data type off each group's first parameter. An empty group may go
        # on this rank alone: the only collectives that cross stages are those of our own norm.
        filled = [dict(group) for group in parameter_groups if group["params"]]
        self._parameters = [param for group in filled for param in group["params"]]
        device = self._parameters[0].device
        state_device = torch.device("cpu") if config.zero_cpu_offload else device
        self._adamw = build_adamw(filled, config, state_device)
        self._zero = _PipelineZero(self._adamw, parameter_names, config, groups, device)

    @property
    def param_groups(self) -> list[ParameterGroup]:
        """See TrainingOptimizer. A group without parameters on this rank is left out."""
        return self._adamw.param_groups

    def step(self) -> StepReport:
        """See TrainingOptimizer."""
        fill_missing_gradients(self._parameters)
        self._zero.take_main_gradients(self._parameters)
        self._zero.reduce_gradients(pipeline_parallel=True)
        self._zero.step()
        self._zero.zero_grad()
        return self._zero.report()

    def state_slices(self) -> list[StateSlice]:
        """See TrainingOptimizer."""
        ensure_state(self._adamw)
        return [
            StateSlice(
                parameter,
                start,
                stop,
                1,
                {
                    name: flat[place : place + stop - start]
                    for name, flat in flat_state(self._adamw, master).items()
                },
            )
            for group, master in enumerate(self._masters)
            for parameter, start, stop, place in self._zero.owned_stretches(group)
        ]

    @property
    def steps(self) -> int:
        """See TrainingOptimizer."""
        return steps_of(self._adamw)

    def continue_from(self, steps: int) -> None:
        """See TrainingOptimizer."""
        set_steps(self._adamw, steps)
        self._zero.update_lp_params()

    def optimizer_state_fraction(self) -> float:
        """See TrainingOptimizer.

        AdamW's moments lie beside the master weights, element by element, so the share of the
        masters is the share of all. Padding to equal partitions is counted as held.
        """
        held = sum(master.numel() for master in self._masters)
        return held / sum(param.numel() for param in self._parameters)

    @property
    def _masters(self) -> list[torch.Tensor]:
        return self._zero.single_partition_of_fp32_groups


class _PipelineZero(DeepSpeedZeroOptimizer):
    """DeepSpeed's ZeRO-1 with gradients accumulated, and their norm taken, by us."""

    def __init__(
        self,
        adamw: torch.optim.Optimizer,
        parameter_names: Mapping[torch.nn.Parameter, str],
        config: OptimizerConfig,
        groups: ProcessGroupCollection,
        device: torch.device,
    ) -> None:
        self._groups = groups
        self._communication_device = device
        self._norm = 0.0
        offload = DeepSpeedZeroOffloadOptimizerConfig(
            device="cpu", pin_memory=device.type == "cuda"
        )
        super().__init__(
            adamw,
            parameter_names,
            timers=NoopTimer(),
            optimizer_params={},
            dp_process_group=groups.dp_cp,
            partition_grads=False,
            overlap_comm=False,
            contiguous_gradients=False,
            # Kernels want each parameter to start at a multiple of 16 bytes.
            parameter_alignment=True,
            reduce_bucket_size=BUCKET_ELEMENTS,
            gradient_accumulation_dtype=torch.float32,
            communication_data_type=torch.float32,
            offload_optimizer_config=offload if config.zero_cpu_offload else None,
            clip_grad=config.clip_grad,
            check_grad_overflow=True,
        )

    def take_main_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Put float32 sums where DeepSpeed keeps its own; a plain `grad` is there already."""
        if not self.use_grad_accum_attribute:
            return
        for param in parameters:
            param.grad_accum = param.main_grad
        clear_main_gradients(parameters)

    def report(self) -> StepReport:
        """What the last step did."""
        return step_report(self._norm, self.clip_grad)

    def owned_stretches(
        self, group_index: int
    ) -> Iterator[tuple[torch.nn.Parameter, int, int, int]]:
        """What this rank's partition of a group holds of each parameter.

        Returns:
            Parameter, first and last (exclusive) element of it, and where the first lies in the
            partition.
        """
        flat = self.bit16_groups_flat[group_index]
        length = self.single_partition_of_fp32_groups[group_index].numel()
        begin = length * self._groups.dp_cp.rank()
        for parameter in self.bit16_groups[group_index]:
            # DeepSpeed orders and pads them as it likes; each is a view of its place.
            offset = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
            start = max(begin - offset, 0)
            stop = min(begin + length - offset, parameter.numel())
            if start < stop:
                yield parameter, start, stop, offset + start - begin

    def create_gradient_handling_hooks(self) -> None:
        """No hooks: main_gradients.py accumulates, whatever order the schedule runs in."""

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """First thing in DeepSpeed's `step()`: take the norm; not finite, the step is skipped."""
        self._norm = global_gradient_norm(
            self._owned_gradients(),
            tensor_parallel_rank=self._groups.tp.rank(),
            groups=[self._groups.dp_cp, self._groups.mp],
            device=self._communication_device,
        )
        self.overflow = not math.isfinite(self._norm)

    def scaled_global_norm(self, norm_type: int = 2) -> torch.Tensor:
        """The norm that DeepSpeed's `step()` clips by.

        DeepSpeed's own makes one collective per parameter group over all stages, which hangs
        where stages have different numbers of groups.
        """
        return torch.tensor(self._norm, dtype=torch.float64, device=self.device)

    def _owned_gradients(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """This rank's slices of the averaged gradients, each with its parameter."""
        for group_index, parameters in enumerate(self.params_in_partition):
            slices = self._gradient_slices(group_index)
            # Padding may follow the last parameter's slice.
            yield from zip(parameters, slices, strict=False)

    def _gradient_slices(self, group_index: int) -> list[torch.Tensor]:
        if self.cpu_offload:
            return self.offload_gradient_dict[group_index]
        slices = self.averaged_gradients[group_index]
        return [each for each in slices if not getattr(each, "_zero_padding", False)]
