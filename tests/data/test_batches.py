import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.data.batches import batches, microbatch_indices


class Counting(torch.utils.data.Dataset):
    """Sample i holds the number i."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = torch.full((4,), index)
        return {"tokens": tokens, "labels": tokens + 1, "loss_mask": torch.ones(4), "else": 0}


def samples(batch):
    return batch["tokens"][:, 0].tolist()


@given(st.integers(0, 50), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_a_step_reads_the_same_samples_in_every_layout(consumed, micro, ranks, micro_batches):
    together = micro * ranks
    step = [
        index
        for number in range(micro_batches)
        for rank in range(ranks)
        for index in microbatch_indices(consumed + number * together, micro, rank, ranks)
    ]
    assert step == list(range(consumed, consumed + micro_batches * together))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_can_be_resumed(num_workers):
    def read(consumed):
        return list(batches(Counting(26), consumed, 3, 1, 2, num_workers))

    everything = read(0)
    assert [samples(batch) for batch in everything] == [
        [3, 4, 5],
        [9, 10, 11],
        [15, 16, 17],
        [21, 22, 23],
    ]
    assert [samples(batch) for batch in read(12)] == [samples(batch) for batch in everything[2:]]
    assert set(everything[0]) == {"tokens", "labels", "loss_mask"}
    assert everything[0]["labels"].dtype == torch.int64
    assert everything[0]["loss_mask"].shape == (3, 4)


def test_ranks_end_together():
    counts = [len(list(batches(Counting(11), 0, 2, rank, 3))) for rank in range(3)]
    assert counts == [1, 1, 1]


def test_reading_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(itertools.islice(batches(Counting(8), 0, 2, 0, 1), 2))
    assert torch.equal(torch.get_rng_state(), before)
