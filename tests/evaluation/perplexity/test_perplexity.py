"""Sums and ratios of perplexity, from scores whose sum is known."""

import math

import numpy as np
import pytest

from megatron_attnres.evaluation.perplexity import perplexity as module
from megatron_attnres.evaluation.perplexity.documents import Document
from megatron_attnres.evaluation.perplexity.perplexity import Perplexity, measure_perplexity
from megatron_attnres.evaluation.scoring.windows import Scores

EOD = 99


def by_id(windows):
    """Every token costs a hundredth of its id, in nats."""
    return [
        Scores(-window.tokens[-window.scored :] / 100, np.zeros(window.scored, dtype=bool))
        for window in windows
    ]


@pytest.mark.parametrize(("context", "stride"), [(4, 4), (4, 1), (5, 3), (64, 64)])
def test_every_token_of_every_document_counts_once(monkeypatch, context, stride):
    # More than one batch of windows.
    monkeypatch.setattr(module, "_POSITIONS_AT_ONCE", 7)
    documents = [Document(np.arange(1, 12), 3, 40), Document(np.arange(1, 3), 2, 5)]
    found = measure_perplexity(iter(documents), by_id, EOD, context, stride)
    assert (found.documents, found.tokens, found.words, found.bytes) == (2, 13, 5, 45)
    assert found.nats == pytest.approx((66 + 3) / 100)


def test_figures_are_those_of_their_definitions():
    figures = Perplexity(1, 10, 4, 30, 20.0).figures
    assert figures == pytest.approx(
        {
            "nats_per_token": 2.0,
            "token_perplexity": math.exp(2.0),
            "word_perplexity": math.exp(5.0),
            "byte_perplexity": math.exp(20 / 30),
            "bits_per_byte": 20 / 30 / math.log(2),
        }
    )


def test_a_figure_that_no_float_holds_is_infinite():
    figures = Perplexity(1, 1000, 1, 0, 5000.0).figures
    assert figures["word_perplexity"] == math.inf
    assert figures["bits_per_byte"] == math.inf
    assert figures["token_perplexity"] == pytest.approx(math.exp(5))
