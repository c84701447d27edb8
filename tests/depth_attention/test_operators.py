"""The choice among implementations and what they refuse; values are in test_two_phase.py."""

from typing import get_args

import pytest
import torch

from megatron_attnres.depth_attention import operators, reference
from megatron_attnres.depth_attention.names import OperatorName
from megatron_attnres.depth_attention.operators import choose, depth_attention
from tests.depth_attention.accuracy import EPS, LIMITS, Block, results
from tests.depth_attention.test_reference import FAULTS

NAMES = get_args(OperatorName)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def operands(dtype=torch.float32, count=3):
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(2, 3, 4, generator=generator).to(dtype) for _ in range(count)]
    query, gain = torch.randn(2, 4, generator=generator).to(dtype)
    return sources, query, gain


@pytest.fixture
def fla_installed(monkeypatch):
    monkeypatch.setattr(operators, "_has_fla", lambda: True)


@pytest.mark.parametrize("return_weights", [True, False])
@pytest.mark.parametrize("operator", NAMES)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_operator_refuses_operands_that_do_not_fit_as_the_reference_does(
    fault, operator, return_weights
):
    replaced, message = FAULTS[fault]
    fitting = {
        "sources": [torch.ones(2, 4)],
        "query": torch.ones(4),
        "key_norm_weight": torch.ones(4),
    }
    with pytest.raises(ValueError, match=message) as error:
        depth_attention(**(fitting | replaced), operator=operator, return_weights=return_weights)
    with pytest.raises(ValueError) as reference_error:
        reference.depth_attention(**(fitting | replaced))
    assert str(error.value) == str(reference_error.value)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_auto_is_two_phases_on_a_cpu(dtype, biased):
    assert choose("auto", CPU, dtype, biased) == "two-phase"
    sources, query, gain = operands(dtype)
    bias = torch.ones(1) if biased else None
    ours, same = (
        depth_attention(sources, query, gain, EPS, bias, operator=name)
        for name in ("auto", "two-phase")
    )
    assert torch.equal(ours, same)


def test_auto_is_fused_on_cuda_for_what_the_fused_operator_can_do(fla_installed):
    assert choose("auto", CUDA, torch.bfloat16, False) == "fused"
    assert choose("auto", CUDA, torch.float32, False) == "fused"
    assert choose("auto", CUDA, torch.bfloat16, True) == "two-phase"
    assert choose("auto", CUDA, torch.float64, False) == "two-phase"


def test_auto_is_two_phases_on_cuda_without_fla(monkeypatch):
    monkeypatch.setattr(operators, "_has_fla", lambda: False)
    assert choose("auto", CUDA, torch.bfloat16, False) == "two-phase"


@pytest.mark.parametrize("operator", ["two-phase", "plain"])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_forced_operator_that_runs_anywhere_stays(operator, device, fla_installed):
    assert choose(operator, device, torch.bfloat16, False) == operator
    assert choose(operator, device, torch.bfloat16, True) == operator


def test_the_fused_operator_is_refused_on_a_cpu(fla_installed):
    sources, query, gain = operands()
    with pytest.raises(ValueError, match=r"needs CUDA.*on cpu.*use two-phase or auto") as error:
        depth_attention(sources, query, gain, operator="fused")
    assert "\n" not in str(error.value)


def test_the_fused_operator_is_refused_without_fla(monkeypatch):
    monkeypatch.setattr(operators, "_has_fla", lambda: False)
    with pytest.raises(ValueError, match=r"pip install fla-core.*use two-phase or auto"):
        choose("fused", CUDA, torch.bfloat16, False)


def test_the_fused_operator_is_refused_with_a_bias_or_float64(fla_installed):
    with pytest.raises(ValueError, match=r"no recency bias.*use two-phase or auto"):
        choose("fused", CUDA, torch.bfloat16, True)
    with pytest.raises(ValueError, match=r"no float64.*use two-phase or auto"):
        choose("fused", CUDA, torch.float64, False)
    assert choose("fused", CUDA, torch.bfloat16, False) == "fused"


@pytest.mark.parametrize("operator", NAMES)
def test_weights_are_returned_whatever_the_operator(operator):
    sources, query, gain = operands(torch.float64)
    bias = torch.ones(1).double()
    mixed, weights = depth_attention(
        sources, query, gain, EPS, bias, return_weights=True, operator=operator
    )
    expected = reference.depth_attention(sources, query, gain, EPS, bias, return_weights=True)
    assert torch.equal(mixed, expected[0])
    assert torch.equal(weights, expected[1])


@pytest.mark.parametrize("operator", ["auto", "two-phase", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_single_source_comes_back(operator, dtype):
    (source,), query, gain = operands(dtype, count=1)
    bias = torch.ones(1, dtype=dtype)
    assert torch.equal(depth_attention([source], query, gain, EPS, bias, operator=operator), source)


@pytest.mark.parametrize("bias", [2, 0.5, torch.tensor(0.5), torch.tensor([0.5])])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 1, 3, 4)])
def test_a_bias_may_be_a_number_and_sources_of_any_number_of_dimensions(bias, shape):
    torch.manual_seed(0)
    sources = [torch.randn(shape).double() for _ in range(3)]
    query, gain = torch.randn(2, 4).double()
    found = depth_attention(sources, query, gain, EPS, bias, operator="two-phase")
    expected = reference.depth_attention(sources, query, gain, EPS, bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_parameters_may_be_of_another_type_than_the_sources():
    sources, query, gain = operands(torch.bfloat16)
    query, gain = (vector.float().requires_grad_() for vector in (query, gain))
    mixed = depth_attention(sources, query, gain, operator="two-phase")
    expected = reference.depth_attention(sources, query, gain)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed, expected)
    gradients = torch.autograd.grad(mixed.sum(), (query, gain))
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


def test_fla_s_plain_operator_is_ours():
    attnres = pytest.importorskip("fla.ops.attnres", exc_type=ImportError)

    def by_fla(block, leaves):
        sources = [leaves[f"summary {index}"] for index in range(block.summaries)]
        return [
            attnres.naive_attnres(leaves["query 0"], sources, leaves["key norm 0"], rms_eps=EPS)
        ]

    def by_us(block, leaves):
        sources = [leaves[f"summary {index}"] for index in range(block.summaries)]
        return [depth_attention(sources, leaves["query 0"], leaves["key norm 0"], EPS)]

    block = Block(9, starts=True, tokens=40, hidden=64)
    leaves, gradients = block.leaves(torch.float32), block.gradients(torch.float32)
    theirs = results(by_fla, block, leaves, gradients)
    for name, tensor in results(by_us, block, leaves, gradients).items():
        difference = (tensor - theirs[name]).norm() / theirs[name].norm()
        assert difference <= LIMITS[torch.float32], name


@pytest.mark.parametrize("gradients", [True, False])
def test_a_bias_may_have_any_shape_of_one_number_and_there_may_be_no_tokens(gradients):
    query, weight, bias = torch.ones(4), torch.ones(4), torch.full((1, 1), 0.5)
    with torch.set_grad_enabled(gradients):
        for shape in ((2, 3, 4), (0, 3, 4)):
            sources = [torch.randn(shape, requires_grad=True) for _ in range(3)]
            found = operators.depth_attention(
                sources, query, weight, recency_bias=bias, operator="two-phase"
            )
            torch.testing.assert_close(
                found, reference.depth_attention(sources, query, weight, recency_bias=bias)
            )
            if gradients:
                found.sum().backward()
                assert sources[0].grad.shape == shape


def test_an_unknown_operator_is_refused():
    source = torch.ones(1, 4)
    with pytest.raises(ValueError, match="must be one of auto, two-phase, fused, plain"):
        operators.depth_attention([source], source[0], source[0], operator="fast")
