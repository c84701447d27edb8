"""Stages with different parameter groups, tensor-parallel replicas and a tied copy."""

import math

import pytest
import torch
from torch import nn

from megatron_attnres.optimizer.build import build_optimizer
from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.optimizer.main_gradients import main_gradient
from tests.distributed import run_ranks
from tests.optimizer import toy


class _Stage(nn.Module):
    """Matrices and vectors, or vectors only; a shard, a replica and a tied copy."""

    def __init__(self, with_matrices: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.ones(7, dtype=dtype))
        if with_matrices:
            self.shard = nn.Parameter(torch.ones(5, 3, dtype=dtype))
            self.shard.tensor_model_parallel = True
            self.tied = nn.Parameter(torch.ones(4, 2, dtype=dtype))
        else:
            self.tied_copy = nn.Parameter(torch.ones(9, dtype=dtype))
            self.tied_copy.shared_copy = True


# Gradients are constant; what each distinct tensor of the model adds to the squared norm.
_GRADIENT = 0.25
_DISTINCT_ELEMENTS = {1: 7 + 15 + 8 + 7, 2: 7 + 2 * 15 + 8 + 7}


def _job(tensor: int, pipeline: int) -> list[dict]:
    groups = toy.make_groups(tensor, pipeline)
    answers = []
    for precision in ("fp32", "bf16", "fp64"):
        for stage in (0, 1) if precision != "fp64" else (0,):
            config = OptimizerConfig(
                lr=0.1, precision=precision, zero_stage=stage, clip_grad=1.0, weight_decay=0.5
            )
            answers.append(_train_stage(config, groups))
    return answers


def _train_stage(config: OptimizerConfig, groups) -> dict:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
    model = _Stage(groups.pp.rank() == 0, dtype[config.precision])
    optimizer = build_optimizer([model], config, groups)
    reports = []
    for _ in range(2):
        for param in model.parameters():
            # Ranks differ; their mean is _GRADIENT.
            offset = groups.dp.rank() - (groups.dp.size() - 1) / 2
            (param.sum() * (_GRADIENT + offset)).backward()
        reports.append(optimizer.step())
    return {
        "norms": [report.grad_norm for report in reports],
        "clipped": [report.clipped for report in reports],
        "weights": {
            name: (param.dim(), param.flatten().tolist())
            for name, param in model.named_parameters()
        },
        "cleared": all(main_gradient(param) is None for param in model.parameters()),
    }


@pytest.mark.parametrize(("tensor", "pipeline", "ranks"), [(1, 2, 2), (1, 2, 4), (2, 2, 4)])
def test_a_stage_without_decayed_parameters(tensor, pipeline, ranks):
    expected = _GRADIENT * math.sqrt(_DISTINCT_ELEMENTS[tensor])
    for answers in run_ranks(_job, ranks, tensor, pipeline, timeout=100):
        for answer in answers:
            assert answer["norms"] == pytest.approx([expected] * 2, rel=1e-6)
            assert answer["clipped"] == [True, True]
            assert answer["cleared"]
            # AdamW with a constant gradient moves by lr each step, decay aside.
            for dimensions, values in answer["weights"].values():
                decay = 1 - 0.1 * 0.5 if dimensions > 1 else 1.0
                after = (decay - 0.1) * decay - 0.1
                assert values == pytest.approx([after] * len(values), rel=1e-2)
