import torch
from torch import nn

from megatron_attnres.optimizer.main_gradients import (
    accumulate_in_fp32,
    clear_main_gradients,
    fill_missing_gradients,
    main_gradient,
)


def test_bf16_gradients_are_summed_in_fp32():
    """256 and then 256 times 1: in bf16 the sum stays at 256, as 257 is not a bf16 number."""
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    accumulate_in_fp32([param])
    for factor in [256.0] + [1.0] * 256:
        (param * factor).sum().backward()
    assert main_gradient(param).dtype == torch.float32
    assert main_gradient(param).tolist() == [512.0] * 3
    assert param.grad is None

    in_bf16 = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    for factor in [256.0] + [1.0] * 256:
        (in_bf16 * factor).sum().backward()
    assert in_bf16.grad.tolist() == [256.0] * 3


def test_accumulating_twice_registers_once():
    param = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    accumulate_in_fp32([param])
    accumulate_in_fp32([param])
    param.sum().backward()
    assert main_gradient(param).tolist() == [1.0, 1.0]


def test_other_types_accumulate_in_grad():
    param = nn.Parameter(torch.ones(2))
    assert main_gradient(param) is None
    param.sum().backward()
    assert main_gradient(param) is param.grad


def test_missing_gradients_are_zeros_and_clearing_forgets():
    plain = nn.Parameter(torch.ones(2))
    half = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    accumulate_in_fp32([half])
    fill_missing_gradients([plain, half])
    assert main_gradient(plain).tolist() == [0.0, 0.0]
    assert main_gradient(half).dtype == torch.float32
    clear_main_gradients([plain, half])
    assert main_gradient(plain) is None
    assert main_gradient(half) is None
