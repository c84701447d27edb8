"""Every token is read once and, but for the first, predicted once."""

import numpy as np
import pytest

from megatron_attnres.analysis.depth.windows import NO_LABEL, batches_of, windows_of


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16, 17])
def test_windows_follow_each_other(tokens):
    ids = np.arange(100, 100 + tokens)
    windows = windows_of(ids, 8)
    assert np.concatenate([window.tokens for window in windows]).tolist() == ids.tolist()
    labels = np.concatenate([window.labels for window in windows]).tolist()
    assert labels == [*ids[1:].tolist(), NO_LABEL]
    assert all(len(window.tokens) == 8 for window in windows[:-1])


@pytest.mark.parametrize("batch_size", [1, 2, 3, 10])
def test_batches_are_of_one_length_and_lose_nothing(batch_size):
    windows = windows_of(np.arange(5 * 8 + 3), 8)
    batches = list(batches_of(windows, batch_size))
    assert [window for batch in batches for window in batch] == windows
    assert all(len(batch) <= batch_size for batch in batches)
    assert all(len({len(window.tokens) for window in batch}) == 1 for batch in batches)
