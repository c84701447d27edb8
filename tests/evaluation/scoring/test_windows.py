"""Every token is scored once, in order, with the context that was promised."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.utils import get_rolling_token_windows

from megatron_attnres.evaluation.scoring.windows import document_windows, windows_of

EOD = 9999


@given(st.data(), st.integers(1, 70), st.integers(1, 20))
def test_every_scored_token_comes_once_with_its_context(data, length, context):
    scored = data.draw(st.integers(0, length))
    stride = data.draw(st.integers(1, context))
    tokens = np.arange(length + 1)
    found = []
    for window in windows_of(tokens, scored, context, stride):
        assert 1 <= window.scored <= window.length <= context
        # The tokens are their own positions: a window must be a stretch of them.
        assert window.tokens.tolist() == list(
            range(window.tokens[0], window.tokens[0] + len(window.tokens))
        )
        for place in range(len(window.tokens) - window.scored, len(window.tokens)):
            position = int(window.tokens[place])
            assert place >= min(position, context - stride + 1)
            found.append(position)
    assert found == list(range(length + 1 - scored, length + 1))


@given(st.integers(0, 60), st.integers(1, 20))
def test_without_overlap_they_are_the_windows_of_the_harness(length, context):
    tokens = np.arange(length)
    ours = [
        (window.tokens[:-1].tolist(), window.tokens[-window.scored :].tolist())
        for window in document_windows(tokens, EOD, context, context)
    ]
    assert ours == list(get_rolling_token_windows(tokens.tolist(), EOD, context, 1))


@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_with_overlap_they_are_the_windows_of_the_harness_too(length, context, data):
    stride = data.draw(st.integers(1, context))
    tokens = np.arange(length)
    ours = [
        (window.tokens[:-1].tolist(), window.tokens[-window.scored :].tolist())
        for window in document_windows(tokens, EOD, context, stride)
    ]
    theirs = get_rolling_token_windows(tokens.tolist(), EOD, context, context - stride + 1)
    assert ours == list(theirs)


def test_the_first_token_follows_an_end_of_document():
    (window,) = document_windows(np.array([5, 6]), EOD, 8, 8)
    assert window.tokens.tolist() == [EOD, 5, 6]
    assert window.scored == 2


@pytest.mark.parametrize("scored", [1, 3, 5])
def test_a_continuation_that_fits_costs_context_on_the_left(scored):
    (window,) = windows_of(np.arange(10), scored, 5, 5)
    assert window.tokens.tolist() == [4, 5, 6, 7, 8, 9]
    assert window.scored == scored
