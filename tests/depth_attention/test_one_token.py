"""A single token's reads against the reference, in every data type."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_attnres.depth_attention.one_token import (
    attend_to_summaries_of_token,
    inverse_rms_of_token,
    is_one_token,
    merge_partial_sum_of_token,
)
from megatron_attnres.depth_attention.reference import depth_attention
from megatron_attnres.depth_attention.statistics import statistics_dtype

HIDDEN, EPS = 32, 1e-6
# Of the results' rounding, beside values of about one.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@settings(max_examples=60)
@given(
    summaries=st.integers(1, 9),
    queries=st.integers(1, 5),
    starts=st.booleans(),
    bias=st.sampled_from([None, 0.7]),
    sharpness=st.sampled_from([0.0, 0.3, 30.0]),
    seed=st.integers(0, 999),
)
def test_both_phases_are_one_read(dtype, summaries, queries, starts, bias, sharpness, seed):
    torch.manual_seed(seed)
    wide = statistics_dtype(dtype)
    sources = [torch.randn(1, 1, HIDDEN, dtype=dtype) for _ in range(summaries)]
    partials = [torch.randn(1, 1, HIDDEN, dtype=dtype) for _ in range(queries)]
    pseudo_queries = (sharpness * torch.randn(queries, HIDDEN)).to(dtype)
    weights = (1 + torch.randn(queries, HIDDEN)).to(dtype)
    biases = None if bias is None else torch.tensor([bias], dtype=dtype)

    directions = pseudo_queries.to(wide) * weights.to(wide)
    norms = [inverse_rms_of_token(source, EPS, wide) for source in sources]
    attended = attend_to_summaries_of_token(sources, norms, directions, biases if starts else None)
    for query, found in enumerate(attended):
        if starts and query == 0:
            merged, read = found.mixed, sources
        else:
            merged = merge_partial_sum_of_token(
                found, partials[query], directions[query], EPS, biases
            )
            read = [*sources, partials[query]]
        expected = depth_attention(read, pseudo_queries[query], weights[query], EPS, biases)
        torch.testing.assert_close(merged, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert merged.dtype == dtype


def test_who_is_served():
    token = torch.zeros(1, 1, HIDDEN)
    assert not is_one_token(token)
    with torch.no_grad():
        assert is_one_token(token)
        assert not is_one_token(torch.zeros(1, 2, HIDDEN))
        assert not is_one_token(torch.zeros(2, 1, HIDDEN))
