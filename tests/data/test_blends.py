import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from megatron_attnres.data.blends import Blend, parse_blend, parse_split, split_bounds
from megatron_attnres.errors import InputError


def test_blends():
    assert parse_blend(("a",)) == Blend(("a",), None)
    assert parse_blend(("a", "b")) == Blend(("a", "b"), None)
    assert parse_blend(("0.3", "a", "7", "b")) == Blend(("a", "b"), (0.3, 7.0))


@pytest.mark.parametrize(
    "words",
    [(), ("0.3",), ("0.3", "a", "b"), ("0.3", "a", "b", "c"), ("a", "1", "b", "2"), ("0", "a"),
     ("-1", "a"), ("nan", "a"), ("inf", "a")],
)  # fmt: skip
def test_bad_blends_are_named(words):
    with pytest.raises(InputError, match="--data-path"):
        parse_blend(words)


@pytest.mark.parametrize(
    "split", ["", "1,2,3,4", "a", "1,-2", "0,0", "9e2,1", "1,,2", "nan", "1;2"]
)
def test_bad_splits_are_named(split):
    with pytest.raises(InputError, match="--split"):
        parse_split(split)


@given(st.lists(st.decimals(0, 1000, places=2), min_size=1, max_size=3), st.integers(0, 10_000))
def test_bounds_are_those_of_megatron(shares, sequences):
    assume(sum(shares) > 0)
    split = ",".join(map(str, shares))
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for ours, theirs in zip(split_bounds(split, sequences), matrix, strict=True):
        if theirs is None:
            assert ours[0] == ours[1]
        else:
            assert ours == tuple(round(edge * float(sequences)) for edge in theirs)
