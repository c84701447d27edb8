import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_attnres.depth_attention import tiles
from megatron_attnres.depth_attention.phase_one import Attended, attend_to_summaries
from megatron_attnres.depth_attention.phase_two import merge_partial_sum
from megatron_attnres.depth_attention.reference import depth_attention
from megatron_attnres.depth_attention.statistics import inverse_rms, statistics_dtype
from tests.depth_attention.memory import LargestStorage, apart_from, kept_for_backward

EPS = 1e-6


class _PhaseOneOf(torch.autograd.Function):
    """Stands for phase 1: what comes back for a mixture is times what comes back for its scale."""

    @staticmethod
    def forward(ctx, mixed):
        return mixed.clone(), mixed.new_ones(mixed.shape[:-1].numel(), 1)

    @staticmethod
    def backward(ctx, grad, grad_scale):
        return grad * grad_scale.view(*grad.shape[:-1], 1)


def operands(tokens=2, hidden=4, dtype=torch.float64, seed=0):
    """Mixture, log-sum, partial sum, direction and bias; all require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    wide = statistics_dtype(dtype)
    tensors = (
        normal(tokens, 2, hidden).to(dtype),
        normal(2 * tokens).to(wide),
        normal(tokens, 2, hidden).to(dtype),
        (2 * hidden**-0.5 * normal(hidden)).to(wide),
        normal(1).to(dtype),
    )
    return [tensor.requires_grad_() for tensor in tensors]


def merge(mixed, log_sum, partial, direction, bias=None):
    mixed, scale = _PhaseOneOf.apply(mixed)
    return merge_partial_sum(Attended(mixed, log_sum, scale), partial, direction, EPS, bias)


@settings(max_examples=50)
@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 9), st.booleans(), st.integers(0, 999))
def test_the_merge_is_the_softmax_over_summaries_and_partial_sum(
    count, tokens, hidden, biased, seed
):
    _, _, partial, direction, bias = operands(tokens, hidden, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    summaries = [torch.randn(tokens, 2, hidden, generator=generator).double() for _ in range(count)]
    norms = [inverse_rms(summary, EPS) for summary in summaries]
    (attended,), _ = attend_to_summaries(summaries, norms, direction.unsqueeze(0))
    bias = bias if biased else None
    merged = merge_partial_sum(attended, partial, direction, EPS, bias)
    expected = depth_attention(
        [*summaries, partial], direction, torch.ones_like(direction), EPS, bias
    )
    torch.testing.assert_close(merged, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("biased", [True, False])
def test_gradients_of_every_operand(biased):
    *tensors, bias = operands()
    assert torch.autograd.gradcheck(merge, (*tensors, bias) if biased else tensors)


@pytest.mark.parametrize("lead", [-200.0, -40.0, 40.0, 200.0])
def test_a_share_that_vanishes_leaves_the_other_side_alone(lead):
    mixed, log_sum, partial, direction, _ = operands(dtype=torch.float32)
    merged = merge(mixed, log_sum + lead, partial, direction)
    torch.testing.assert_close(merged, mixed if lead > 0 else partial)
    gradients = torch.autograd.grad(merged.sum(), (mixed, log_sum, partial, direction))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_small_share_keeps_its_digits(sign):
    """1 - a would be rounded to a multiple of 6e-8."""
    mixed, log_sum, partial, direction, _ = operands(dtype=torch.float32)
    nothing = torch.zeros_like(mixed)
    pair = (mixed, nothing) if sign < 0 else (nothing, partial)
    direction = torch.zeros_like(direction)
    merged = merge(pair[0], torch.full_like(log_sum, 20.0 * sign), pair[1], direction)
    share = torch.sigmoid(torch.tensor(-20.0, dtype=torch.float64))
    torch.testing.assert_close(merged.double(), share * sum(pair).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_keeps_references_to_its_operands_and_scalars_per_token(dtype):
    tokens, hidden = 2 * 16, 64
    mixed, log_sum, partial, direction, bias = operands(16, hidden, dtype)
    attended = Attended(mixed, log_sum, torch.ones(tokens, 1, requires_grad=True))
    with kept_for_backward() as kept:
        merge_partial_sum(attended, partial, direction, EPS, bias)
    own = apart_from(kept, [mixed, partial, direction, bias])
    assert len(kept) - len(own) == 4
    # The partial sum's inverse RMS and logit, and the two shares.
    assert [tensor.numel() for tensor in own] == [tokens] * 4
    assert {tensor.dtype for tensor in own} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temporaries_are_of_a_tile_s_size(dtype, monkeypatch):
    monkeypatch.setitem(tiles._BYTES, "cpu", 1)
    mixed, log_sum, partial, direction, bias = operands(16, 64, dtype)
    attended = Attended(mixed, log_sum, torch.ones(32, 1, requires_grad=True))
    with LargestStorage() as largest:
        merged = merge_partial_sum(attended, partial, direction, EPS, bias)
        merged.backward(torch.ones_like(merged))
    # The result, or the partial sum's gradient.
    assert largest.bytes == partial.numel() * dtype.itemsize
