import math

import pytest
import torch
from torch import nn

from megatron_attnres.optimizer.gradient_norm import (
    clip_factor,
    counts_in_norm,
    global_gradient_norm,
)


def _norm(parameters, rank: int = 0) -> float:
    pairs = [(param, param.grad) for param in parameters]
    return global_gradient_norm(pairs, rank, groups=[], device=torch.device("cpu"))


def _parameters_with_gradients() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [(5, 3), (7,), ()]]
    for param in parameters:
        param.grad = torch.randn(param.shape, generator=generator)
    return parameters


def test_norm_equals_the_norm_of_the_concatenation():
    parameters = _parameters_with_gradients()
    flat = torch.cat([param.grad.flatten().double() for param in parameters])
    assert _norm(parameters) == pytest.approx(flat.norm().item(), rel=1e-14)


def test_norm_of_bf16_numbers_is_not_taken_in_bf16():
    param = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    param.grad = torch.full_like(param, 0.1)
    exact = float(torch.tensor(0.1, dtype=torch.bfloat16)) * math.sqrt(100_000)
    assert _norm([param]) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("limit", [0.1, 1.0, 1e3])
def test_clipping_equals_pytorchs(limit):
    parameters = _parameters_with_gradients()
    ours = [param.grad * clip_factor(_norm(parameters), limit) for param in parameters]
    nn.utils.clip_grad_norm_(parameters, limit)
    for gradient, param in zip(ours, parameters, strict=True):
        torch.testing.assert_close(gradient, param.grad, rtol=1e-6, atol=0)


def test_no_limit_leaves_gradients_as_they_are():
    assert clip_factor(1e9, 0.0) == 1.0


def test_each_tensor_of_the_model_counts_once():
    replica, shard, copy = (nn.Parameter(torch.zeros(2, 2)) for _ in range(3))
    shard.tensor_model_parallel = True
    copy.tensor_model_parallel = True
    copy.shared_copy = True
    assert [counts_in_norm(param, 0) for param in (replica, shard, copy)] == [True, True, False]
    assert [counts_in_norm(param, 1) for param in (replica, shard, copy)] == [False, True, False]
