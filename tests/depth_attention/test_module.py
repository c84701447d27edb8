import pytest
import torch

from megatron_attnres.depth_attention.module import DepthAttention, ResidualRead
from megatron_attnres.depth_attention.reference import depth_attention
from megatron_attnres.depth_attention.state import DepthState


def state_of(*numbers, partial=None, hidden=4):
    tensors = [torch.full((2, 1, hidden), float(number)) for number in numbers]
    return DepthState(tuple(tensors), partial)


@pytest.mark.parametrize("bias", [None, 0.0, -1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_start_values(bias, dtype):
    reader = DepthAttention(4, 1e-6, bias, dtype)
    expected = {"query": [0.0] * 4, "key_norm_weight": [1.0] * 4}
    if bias is not None:
        expected["recency_bias"] = [bias]
    parameters = dict(reader.named_parameters())
    assert {name: parameter.tolist() for name, parameter in parameters.items()} == expected
    assert {parameter.dtype for parameter in parameters.values()} == {dtype}


def test_no_parameter_takes_weight_decay():
    assert all(parameter.no_weight_decay for parameter in DepthAttention(4, 1e-6, 0.0).parameters())


def test_a_fresh_reader_takes_the_mean_of_sources_and_partial_sum():
    partial = torch.full((2, 1, 4), 6.0)
    torch.testing.assert_close(
        DepthAttention(4, 1e-6)(state_of(1, 2, partial=partial)), torch.full((2, 1, 4), 3.0)
    )
    torch.testing.assert_close(DepthAttention(4, 1e-6)(state_of(1, 2)), torch.full((2, 1, 4), 1.5))


def test_the_bias_goes_to_the_newest_source():
    reader = DepthAttention(4, 1e-6, recency_bias=50.0)
    partial = torch.full((2, 1, 4), 6.0)
    torch.testing.assert_close(reader(state_of(1, 2, partial=partial)), partial)
    torch.testing.assert_close(reader(state_of(1, 2)), torch.full((2, 1, 4), 2.0))


def test_a_reader_is_the_operator_with_its_parameters():
    torch.manual_seed(0)
    reader = DepthAttention(4, 0.5, recency_bias=0.3)
    torch.nn.init.normal_(reader.query)
    torch.nn.init.normal_(reader.key_norm_weight)
    sources = [torch.randn(2, 3, 4) for _ in range(3)]
    expected = depth_attention(
        sources, reader.query, reader.key_norm_weight, 0.5, reader.recency_bias
    )
    found = reader(DepthState(tuple(sources[:2]), sources[2]))
    torch.testing.assert_close(found, expected)


def test_every_parameter_gets_a_gradient():
    torch.manual_seed(0)
    reader = DepthAttention(4, 1e-6, recency_bias=0.0)
    torch.nn.init.normal_(reader.query)
    mixed = reader(DepthState((torch.randn(2, 1, 4), torch.randn(2, 1, 4)), None))
    (mixed * torch.randn(2, 1, 4)).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in reader.parameters())


def test_the_residual_stream_is_read_as_it_is():
    partial = torch.ones(2, 1, 4)
    assert ResidualRead()(DepthState((), partial)) is partial
    assert not list(ResidualRead().parameters())


def test_a_missing_residual_stream_is_a_fault_of_the_program():
    with pytest.raises(AssertionError, match="residual stream"):
        ResidualRead()(state_of(1))
