import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.data.blends import split_bounds
from megatron_attnres.data.configuration import DataConfig
from megatron_attnres.data.indexed_files import check_prefix
from megatron_attnres.data.statistics import (
    label_counts,
    sum_counts,
    training_token_counts,
    unigram_entropy,
)


@given(
    st.lists(st.integers(0, 6), max_size=30), st.lists(st.integers(0, 6), min_size=1, max_size=30)
)
def test_entropy_is_the_mean_cost_of_the_tokens(training, evaluation):
    counts = [sum_counts([np.array(ids, dtype=np.int64)], 7) for ids in (training, evaluation)]
    costs = [-math.log((training.count(id_) + 1) / (len(training) + 7)) for id_ in evaluation]
    assert math.isclose(unigram_entropy(*counts), sum(costs) / len(costs), rel_tol=1e-12)


def test_masked_labels_do_not_count():
    labels = torch.tensor([[1, 1, 2], [0, 1, 2]])
    mask = torch.tensor([[1.0, 0, 1], [1, 1, 0]])
    assert label_counts(labels, mask, 4).tolist() == [1, 2, 1, 0]


def test_training_counts_are_those_of_the_training_split(indexed):
    prefix = indexed.output_prefix
    pair = check_prefix(prefix)
    first, last = split_bounds("7,3", len(pair.sequence_lengths))[0]
    tokens = np.concatenate(list(pair.chunks(0, pair.tokens_between(first, last))))
    counts = training_token_counts(DataConfig((prefix,), "7,3"), 1000)
    assert np.array_equal(counts, np.bincount(tokens, minlength=1000))
    double = training_token_counts(DataConfig((prefix, prefix), "7,3"), 1000)
    assert np.array_equal(double, 2 * counts)


def test_blends_count_by_weight(indexed, copied_prefix):
    prefix = indexed.output_prefix
    blend = DataConfig(("1", prefix, "3", copied_prefix), "7,3")
    counts = training_token_counts(DataConfig((prefix,), "7,3"), 1000)
    assert np.allclose(training_token_counts(blend, 1000), 2 * counts)
