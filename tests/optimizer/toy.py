"""A small model, its data and its process groups for the optimizer's multi-process tests."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron_attnres.optimizer.build import build_optimizer
from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.optimizer.training_optimizer import TrainingOptimizer

WIDTH = 13  # odd, so that partitions cut through parameters and need padding
MICRO_BATCHES = 3


def make_groups(tensor: int = 1, pipeline: int = 1) -> ProcessGroupCollection:
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
    names = ["tp", "pp", "mp", "dp", "dp_cp", "cp"]
    return ProcessGroupCollection.use_mpu_process_groups(names)


def make_model(dtype: torch.dtype = torch.float32, seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    )
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.3 * torch.randn(param.shape, generator=generator))
    return model.to(dtype)


def batches(step: int, data_rank: int, dtype: torch.dtype = torch.float32) -> Iterator:
    """MICRO_BATCHES pairs of inputs and targets that no other step or rank sees."""
    for micro_batch in range(MICRO_BATCHES):
        seed = 1000 * step + 10 * data_rank + micro_batch
        generator = torch.Generator().manual_seed(seed)
        pair = torch.randn(2, 4, WIDTH, generator=generator)
        yield pair[0].to(dtype), pair[1].to(dtype)


def backward(model: nn.Module, step: int, data_rank: int) -> float:
    """Accumulate the mean gradient of this rank's micro-batches; returns their mean loss."""
    dtype = next(model.parameters()).dtype
    total = 0.0
    for inputs, targets in batches(step, data_rank, dtype):
        loss = (model(inputs) - targets).square().mean() / MICRO_BATCHES
        loss.backward()
        total += loss.item()
    return total


def train(config: OptimizerConfig, steps: int, groups: ProcessGroupCollection) -> dict:
    """Train a fresh model; see train_model."""
    model = make_model(torch.bfloat16 if config.precision == "bf16" else torch.float32)
    return train_model(model, build_optimizer([model], config, groups), steps, groups)


def train_model(
    model: nn.Module,
    optimizer: TrainingOptimizer,
    steps: int,
    groups: ProcessGroupCollection,
    first_step: int = 0,
) -> dict:
    """Losses averaged over data-parallel ranks, reports, final weights and the optimizer."""
    losses, reports = [], []
    for step in range(first_step, first_step + steps):
        loss = torch.tensor(backward(model, step, groups.dp.rank()), dtype=torch.float64)
        dist.all_reduce(loss, group=groups.dp)
        losses.append(loss.item() / groups.dp.size())
        reports.append(optimizer.step())
    weights = [param.detach().clone() for param in model.parameters()]
    return {"losses": losses, "reports": reports, "weights": weights, "optimizer": optimizer}
