"""Against an implementation of its own in float64 numpy, written from the paper's equations."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_attnres
from megatron_attnres.depth_attention import operators
from megatron_attnres.depth_attention.reference import depth_attention

EPS = 1e-6


def oracle(sources, query, key_norm_weight, eps=EPS, bias=0.0):
    """Mix and weights, one token after the other."""
    values = np.stack([source.double().numpy() for source in sources])
    query, key_norm_weight = query.double().numpy(), key_norm_weight.double().numpy()
    mixed = np.empty(values.shape[1:])
    weights = np.empty(values.shape[:-1])
    for token in np.ndindex(values.shape[1:-1]):
        logits = np.empty(len(values))
        for index, value in enumerate(values):
            key = value[token] / np.sqrt(np.mean(value[token] ** 2) + eps) * key_norm_weight
            logits[index] = query @ key
        logits[-1] += bias
        odds = np.exp(logits - logits.max())
        weights[(slice(None), *token)] = odds / odds.sum()
        mixed[token] = sum(w * v[token] for w, v in zip(odds / odds.sum(), values, strict=True))
    return torch.from_numpy(mixed), torch.from_numpy(weights)


@st.composite
def operands(draw, dtypes=(torch.float64,), min_sources=1):
    """Sources, query, key-norm weight and recency bias (or None), of one data type."""
    count = draw(st.integers(min_sources, 17))
    shape = (*draw(st.lists(st.integers(1, 4), max_size=3)), draw(st.integers(1, 24)))
    dtype = draw(st.sampled_from(dtypes))
    with_bias = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    sources = [normal(*shape) * 3 for _ in range(count)]
    bias = 2 * normal(1) if with_bias else None
    return sources, normal(shape[-1]), 1 + normal(shape[-1]) / 2, bias


def small(*, count=3, hidden=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    sources = [torch.randn(2, 1, hidden, generator=generator).to(dtype) for _ in range(count)]
    query = torch.randn(hidden, generator=generator).to(dtype)
    return sources, query, torch.ones(hidden, dtype=dtype)


@settings(max_examples=60)
@given(operands())
def test_float64_follows_the_definition(case):
    sources, query, gain, bias = case
    mixed, weights = depth_attention(sources, query, gain, EPS, bias, return_weights=True)
    expected = oracle(sources, query, gain, bias=0.0 if bias is None else bias.item())
    torch.testing.assert_close(mixed, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weights, expected[1], rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(operands())
def test_weights_are_what_mixes_the_values(case):
    sources, query, gain, bias = case
    mixed, weights = depth_attention(sources, query, gain, EPS, bias, return_weights=True)
    assert weights.shape == (len(sources), *sources[0].shape[:-1])
    torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]))
    products = sum(w.unsqueeze(-1) * v for w, v in zip(weights, sources, strict=True))
    torch.testing.assert_close(mixed, products)
    assert torch.equal(depth_attention(sources, query, gain, EPS, bias), mixed)


@settings(max_examples=60)
@given(operands(dtypes=(torch.bfloat16, torch.float16, torch.float32)))
def test_narrow_types_have_float32_statistics(case):
    sources, query, gain, bias = case
    mixed, weights = depth_attention(sources, query, gain, EPS, bias, return_weights=True)
    assert (mixed.dtype, weights.dtype) == (sources[0].dtype, torch.float32)
    expected = oracle(sources, query, gain, bias=0.0 if bias is None else bias.item())
    torch.testing.assert_close(weights.double(), expected[1], rtol=1e-4, atol=1e-6)
    # Only the result is rounded to the narrow type, once.
    largest = torch.stack(sources).double().abs().amax(0)
    rounding = torch.finfo(mixed.dtype).eps / 2 * expected[0].abs()
    assert ((mixed.double() - expected[0]).abs() <= rounding + 1e-5 * largest).all()


@settings(max_examples=30)
@given(operands())
def test_a_zero_query_takes_the_mean(case):
    sources, query, gain, _ = case
    mixed = depth_attention(sources, torch.zeros_like(query), gain)
    torch.testing.assert_close(mixed, torch.stack(sources).mean(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_single_source_comes_back(dtype):
    (source,), query, gain = small(count=1, dtype=dtype)
    bias = torch.tensor([3.0], dtype=dtype)
    assert torch.equal(depth_attention([source], query, gain, EPS, bias), source)


@settings(max_examples=30)
@given(operands(min_sources=2), st.randoms(use_true_random=False))
def test_the_order_of_sources_is_of_no_account_without_bias(case, random):
    sources, query, gain, _ = case
    shuffled = random.sample(sources, len(sources))
    torch.testing.assert_close(
        depth_attention(shuffled, query, gain), depth_attention(sources, query, gain)
    )


def test_the_bias_moves_weight_to_the_newest_source():
    sources, query, gain = small()
    _, plain = depth_attention(sources, query, gain, return_weights=True)
    bias = torch.tensor(0.7)
    _, biased = depth_attention(sources, query, gain, EPS, bias, return_weights=True)
    odds = biased[-1] / biased[:-1] / (plain[-1] / plain[:-1])
    torch.testing.assert_close(odds, torch.full_like(odds, 0.7).exp())


def test_eps_counts_in_the_mean_square():
    sources, query, gain = small(dtype=torch.float64)
    for eps in (1e-12, 0.5):
        expected, _ = oracle(sources, query, gain, eps)
        torch.testing.assert_close(depth_attention(sources, query, gain, eps), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_zero_sources_stay_finite(dtype):
    sources, query, gain = small(dtype=dtype)
    sources = [torch.zeros_like(source).requires_grad_() for source in sources]
    query.requires_grad_()
    mixed = depth_attention(sources, query, gain)
    assert torch.equal(mixed, torch.zeros_like(mixed))
    mixed.sum().backward()
    for gradient in (query.grad, *(source.grad for source in sources)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-3, 1e4, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_scale_of_the_sources(scale, dtype):
    sources, query, gain = small(dtype=dtype)
    sources = [source * scale for source in sources]
    mixed, weights = depth_attention(sources, query, gain, return_weights=True)
    expected = oracle(sources, query, gain)
    torch.testing.assert_close(weights.double(), expected[1], rtol=1e-4, atol=1e-6)
    tolerance = torch.finfo(dtype).eps * torch.stack(sources).double().abs().amax()
    assert ((mixed.double() - expected[0]).abs() <= tolerance).all()


def test_a_large_query_picks_one_source():
    sources, query, gain = small(dtype=torch.float32)
    _, weights = depth_attention(sources, query * 1e6, gain, return_weights=True)
    torch.testing.assert_close(weights.amax(0), torch.ones(2, 1))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_of_every_operand(count, with_bias):
    sources, query, gain = small(count=count, dtype=torch.float64)
    bias = [torch.tensor([0.3], dtype=torch.float64)] if with_bias else []
    inputs = [tensor.requires_grad_() for tensor in (*sources, query, gain, *bias)]

    def mix(*tensors):
        query, gain, *bias = tensors[count:]
        return depth_attention(tensors[:count], query, gain, EPS, *bias, return_weights=True)

    assert torch.autograd.gradcheck(mix, inputs)


def test_operands_are_left_alone():
    sources, query, gain = small()
    copies = [tensor.clone() for tensor in (*sources, query, gain)]
    depth_attention(sources, query, gain, EPS, torch.ones(1))
    for tensor, copy in zip((*sources, query, gain), copies, strict=True):
        assert torch.equal(tensor, copy)


FAULTS = {
    "no source": ({"sources": []}, "sources is empty"),
    "shape": (
        {"sources": [torch.ones(2, 4), torch.ones(3, 4)]},
        r"sources\[1\] is \(3, 4\).*sources\[0\] is \(2, 4\)",
    ),
    "hidden size": (
        {"sources": [torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 5)]},
        r"sources\[2\] is \(2, 5\)",
    ),
    "data type": (
        {"sources": [torch.ones(2, 4), torch.ones(2, 4).double()]},
        r"sources\[1\].*float64.*float32",
    ),
    "device": (
        {"sources": [torch.ones(2, 4), torch.ones(2, 4, device="meta")]},
        r"sources\[1\].*meta.*cpu",
    ),
    "whole numbers": ({"sources": [torch.ones(2, 4).int()]}, "sources are torch.int32"),
    "scalar": ({"sources": [torch.tensor(1.0)]}, r"query has shape \(4,\); it must be \(0,\)"),
    "query": ({"query": torch.ones(5)}, r"query has shape \(5,\); it must be \(4,\)"),
    "query matrix": ({"query": torch.ones(1, 4)}, r"query has shape \(1, 4\)"),
    "key norm": ({"key_norm_weight": torch.ones(1)}, r"key_norm_weight has shape \(1,\)"),
    "bias": ({"recency_bias": torch.ones(2)}, r"recency_bias has shape \(2,\).*one number"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_operands_that_do_not_fit_are_named(fault):
    replaced, message = FAULTS[fault]
    fitting = {
        "sources": [torch.ones(2, 4)],
        "query": torch.ones(4),
        "key_norm_weight": torch.ones(4),
    }
    with pytest.raises(ValueError, match=message) as error:
        depth_attention(**(fitting | replaced))
    assert "\n" not in str(error.value)


def test_the_package_offers_the_operator_though_a_folder_has_its_name():
    sources, query, gain = small()
    for _ in range(2):
        mixed = megatron_attnres.depth_attention(sources, query, gain)
        assert torch.equal(mixed, operators.depth_attention(sources, query, gain))
