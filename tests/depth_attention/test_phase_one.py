from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_attnres.depth_attention import tiles
from megatron_attnres.depth_attention.phase_one import attend_to_summaries
from megatron_attnres.depth_attention.reference import depth_attention
from megatron_attnres.depth_attention.statistics import inverse_rms, statistics_dtype
from tests.depth_attention.memory import LargestStorage, apart_from, kept_for_backward, storage

EPS = 1e-6


def operands(count=3, queries=2, tokens=2, hidden=4, dtype=torch.float64, seed=0):
    """Directions, a bias and summaries [tokens, 2, h]; all require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    directions = (2 * hidden**-0.5 * normal(queries, hidden)).to(statistics_dtype(dtype))
    summaries = [normal(tokens, 2, hidden).to(dtype) for _ in range(count)]
    return [tensor.requires_grad_() for tensor in (directions, normal(1).to(dtype), *summaries)]


def attend(directions, bias, *summaries):
    norms = [inverse_rms(summary, EPS) for summary in summaries]
    return attend_to_summaries(summaries, norms, directions, bias).attended


def mixtures_and_log_sums(*tensors):
    found = attend(*tensors)
    return (*(one.mixed for one in found), *(one.log_sum for one in found))


@settings(max_examples=50)
@given(
    st.integers(1, 9), st.integers(1, 5), st.integers(1, 6), st.integers(1, 9), st.integers(0, 999)
)
def test_every_query_finds_the_softmax_mixture_and_its_denominator(
    count, queries, tokens, hidden, seed
):
    directions, bias, *summaries = operands(count, queries, tokens, hidden, seed=seed)
    unit = torch.ones(hidden, dtype=torch.float64)
    for query, found in enumerate(attend(directions, bias, *summaries)):
        own_bias = bias if query == 0 else None
        mixed, weights = depth_attention(
            summaries, directions[query], unit, EPS, own_bias, return_weights=True
        )
        torch.testing.assert_close(found.mixed, mixed, rtol=1e-12, atol=1e-12)
        newest = summaries[-1].flatten(0, 1)
        logit = (newest @ directions[query]) * inverse_rms(newest, EPS)
        if own_bias is not None:
            logit = logit + own_bias
        log_sum = logit - weights[-1].flatten().log()
        torch.testing.assert_close(found.log_sum, log_sum, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_results_are_of_the_summaries_shape_and_type_and_statistics_are_wide(dtype):
    for found in attend(*operands(tokens=3, dtype=dtype)):
        assert (found.mixed.shape, found.mixed.dtype) == ((3, 2, 4), dtype)
        assert (found.log_sum.shape, found.log_sum.dtype) == ((6,), statistics_dtype(dtype))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("tile_bytes", [1, 1 << 20])
def test_gradients_of_mixtures_and_denominators(count, biased, tile_bytes, monkeypatch):
    monkeypatch.setitem(tiles._BYTES, "cpu", tile_bytes)
    directions, bias, *summaries = operands(count)
    tensors = (directions, bias if biased else None, *summaries)
    assert torch.autograd.gradcheck(mixtures_and_log_sums, tensors)


@pytest.mark.parametrize("used", range(4))
def test_a_result_that_nothing_used_has_no_part_in_the_gradients(used):
    """Mixtures and denominators of two queries; only one of the four gets a gradient."""
    tensors = operands()
    results = mixtures_and_log_sums(*tensors)
    weights = [torch.linspace(-1, 1, one.numel()).view_as(one).double() for one in results]
    found = torch.autograd.grad(results[used], tensors, weights[used], allow_unused=True)
    zeros = [weight if index == used else 0 * weight for index, weight in enumerate(weights)]
    expected = torch.autograd.grad(mixtures_and_log_sums(*tensors), tensors, zeros)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    query = used % 2
    assert found[0][query].any()
    assert not found[0][1 - query].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [True, False])
def test_it_keeps_references_to_the_summaries_and_scalars_per_token(dtype, strided):
    count, queries, tokens = 5, 3, 2 * 16
    directions, bias, *summaries = operands(count, queries, 16, 64, dtype)
    if strided:
        summaries = [summary.detach().transpose(0, 1).requires_grad_() for summary in summaries]
    with kept_for_backward() as kept:
        attend(directions, bias, *summaries)
    own = apart_from(kept, [directions, bias, *summaries])
    assert len(kept) - len(own) == count + 2
    assert {storage(one) for one in summaries} < {storage(one) for one in kept}
    # Logits and weights, and the inverse RMS of every summary.
    assert sum(tensor.numel() for tensor in own) == (2 * queries + 1) * count * tokens
    assert {tensor.dtype for tensor in own} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_as_large_as_all_summaries_is_allocated(dtype, monkeypatch):
    count, queries, tokens, hidden = 8, 3, 2 * 64, 128
    tensors = operands(count, queries, 64, hidden, dtype)
    source_bytes = tokens * hidden * dtype.itemsize
    monkeypatch.setitem(tiles._BYTES, "cpu", 4 * count * hidden * dtype.itemsize)
    with LargestStorage() as forward:
        found = attend(*tensors)
    # The results themselves: they are one tensor.
    assert forward.bytes == queries * source_bytes
    mixed = [one.mixed for one in found]
    gradients = [torch.ones_like(one) for one in mixed]
    with LargestStorage() as backward:
        torch.autograd.backward(mixed, gradients)
    # A source's own gradient, or a query's share of ours.
    assert backward.bytes == source_bytes


def by_chunks(cuts, layers, operands):
    """A block cut at some of its layers: each chunk serves its own queries, the last one first.

    The gradients of the summaries go from chunk to chunk as a pipeline sends them.
    """
    directions, bias, gradients, *summaries = operands
    starts = [0, *cuts]
    chunks = [layers[start:stop] for start, stop in zip(starts, [*cuts, len(layers)], strict=True)]
    norms = [inverse_rms(summary, EPS) for summary in summaries]
    passed = [torch.full_like(summary, 0.3) for summary in summaries]
    mixed, grad_directions = [], torch.zeros_like(directions)
    for chunk in reversed(chunks):
        own = slice(chunk[0].start, chunk[-1].stop)
        padded = torch.zeros_like(directions)
        padded[own] = directions.detach()[own]
        padded.requires_grad_()
        first_bias = bias if own.start == 0 else None
        leaves = [summary.detach().requires_grad_() for summary in summaries]
        found = attend_to_summaries(leaves, norms, padded, first_bias, chunk)
        results = [one.mixed for one in found.attended]
        mixed = [*results, *mixed]
        flowing = [*gradients[own], *passed]
        inputs = [padded, *leaves]
        grads = torch.autograd.grad([*results, *found.summaries], inputs, flowing)
        grad_directions += grads[0]
        passed = grads[1:]
    return [*mixed, grad_directions, *passed]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=60)
@given(
    count=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 2), min_size=2, max_size=5),
    tokens=st.integers(1, 40),
    hidden=st.sampled_from([8, 48, 64, 200]),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_cutting_a_block_between_layers_changes_no_bit(
    dtype, count, sizes, tokens, hidden, seed, data
):
    """Of results and gradients: a pipeline's losses are one process's."""
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sizes) - 1), min_size=1)))
    ends = list(accumulate(sizes))
    layers = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    directions, bias, *summaries = operands(count, ends[-1], tokens, hidden, dtype, seed)
    gradients = [torch.randn_like(summaries[0]) for _ in range(ends[-1])]
    tensors = (directions, bias, gradients, *summaries)
    whole = by_chunks([], layers, tensors)
    for one, other in zip(whole, by_chunks(cuts, layers, tensors), strict=True):
        assert torch.equal(one, other)


def test_the_norms_are_the_callers_and_get_no_gradient():
    directions, _, *summaries = operands()
    halved = [inverse_rms(summary, EPS) / 2 for summary in summaries]
    found = attend_to_summaries(summaries, halved, 2 * directions).attended
    for one, other in zip(found, attend(directions, None, *summaries), strict=True):
        torch.testing.assert_close(one.mixed, other.mixed)
        torch.testing.assert_close(one.log_sum, other.log_sum)
    assert not inverse_rms(summaries[0], EPS).requires_grad


def test_it_runs_without_gradients():
    tensors = operands()
    with torch.inference_mode():
        found = mixtures_and_log_sums(*tensors)
    for one, other in zip(found, mixtures_and_log_sums(*tensors), strict=True):
        assert not one.requires_grad
        assert torch.equal(one, other)
