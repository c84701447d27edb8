"""The single-node operator against the reference: values, gradients, what it keeps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.depth_attention.reference import depth_attention
from megatron_attnres.depth_attention.single_pass import depth_attention_single_pass


def operands(sources, tokens, hidden, biased, seed, dtype=torch.float64, scale=1.0):
    """Query, key-norm weight, bias (or None) and sources; all require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    vectors = [random(hidden), random(hidden), random(1) if biased else None]
    values = [scale * random(tokens, 2, hidden) for _ in range(sources)]
    return [
        None if tensor is None else tensor.to(dtype).requires_grad_()
        for tensor in (*vectors, *values)
    ]


def value_and_gradients(operator, query, key_norm_weight, bias, *sources):
    mixed = operator(sources, query, key_norm_weight, recency_bias=bias)
    wanted = [tensor for tensor in (query, key_norm_weight, bias, *sources) if tensor is not None]
    direction = torch.linspace(-1, 1, mixed.numel(), dtype=mixed.dtype).view_as(mixed)
    return [mixed.detach(), *torch.autograd.grad(mixed, wanted, direction)]


@given(
    sources=st.integers(1, 17),
    tokens=st.integers(1, 5),
    hidden=st.integers(1, 9),
    biased=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_the_reference_s(sources, tokens, hidden, biased, scale, seed):
    given_operands = operands(sources, tokens, hidden, biased, seed, scale=scale)
    found = value_and_gradients(depth_attention_single_pass, *given_operands)
    wanted = value_and_gradients(depth_attention, *given_operands)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        # Gradients of the keys cancel to nothing for a single source or a large scale.
        floor = 1e-12 * max(1.0, scale)
        torch.testing.assert_close(one, other, rtol=1e-9, atol=floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_as_close_to_float64_as_the_reference(dtype):
    narrow = operands(9, 64, 32, True, 3, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in narrow]
    wanted = value_and_gradients(depth_attention, *exact)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(
        value_and_gradients(depth_attention_single_pass, *narrow), wanted, strict=True
    ):
        assert one.dtype == dtype
        assert (one.double() - other).abs().max() <= tolerance * other.abs().max()


def test_gradcheck():
    query, key_norm_weight, bias, *sources = operands(3, 2, 4, True, 5)
    assert torch.autograd.gradcheck(
        lambda q, g, b, *v: depth_attention_single_pass(v, q, g, recency_bias=b),
        (query, key_norm_weight, bias, *sources),
    )


def test_sources_of_zeros_give_finite_gradients():
    query, key_norm_weight, _, *sources = operands(3, 2, 4, False, 5)
    zeros = [torch.zeros_like(source).requires_grad_() for source in sources]
    for tensor in value_and_gradients(
        depth_attention_single_pass, query, key_norm_weight, None, *zeros
    ):
        assert torch.isfinite(tensor).all()


def test_it_keeps_its_sources_and_scalars_per_token_only():
    tokens, hidden = 64, 128
    query, key_norm_weight, _, *sources = operands(5, tokens, hidden, False, 1)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        depth_attention_single_pass(sources, query, key_norm_weight)
    storages = {source.untyped_storage().data_ptr() for source in sources}
    others = [t for t in kept if t.untyped_storage().data_ptr() not in storages]
    assert len(kept) - len(others) == len(sources)
    assert sum(tensor.numel() for tensor in others) <= 2 * hidden + 3 * 5 * tokens * 2


def test_it_refuses_what_the_reference_refuses():
    query, key_norm_weight, _, *sources = operands(2, 2, 4, False, 1)
    with pytest.raises(ValueError, match="sources is empty"):
        depth_attention_single_pass([], query, key_norm_weight)
    with pytest.raises(ValueError, match="query has shape"):
        depth_attention_single_pass(sources, query[:3], key_norm_weight)
