"""Windows as micro-batches: all of them, in shapes that do not depend on the layout."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.evaluation.scoring.batching import (
    micro_batches_of_rank,
    padded_length,
    plan_runs,
)

lengths_up_to_96 = st.lists(st.integers(1, 96), max_size=60)


@given(lengths_up_to_96, st.integers(1, 5), st.sampled_from([1, 2, 3]))
def test_every_window_gets_a_row_that_it_fits(lengths, batch_size, multiple):
    runs = plan_runs(lengths, batch_size, 96, multiple)
    found = []
    for run in runs:
        assert run.seq_length % multiple == 0
        for micro_batch in run.micro_batches:
            assert 1 <= len(micro_batch) <= batch_size
            assert all(lengths[index] <= run.seq_length for index in micro_batch)
            found += micro_batch
    assert sorted(found) == list(range(len(lengths)))
    shapes = [run.seq_length for run in runs]
    assert shapes == sorted(set(shapes), reverse=True)


@given(st.integers(1, 100_000), st.integers(1, 8))
def test_padding_is_at_most_an_eighth(length, multiple):
    padded = padded_length(length, multiple)
    assert length <= padded <= length + length // 8 + multiple
    assert padded % multiple == 0


@given(lengths_up_to_96, st.integers(1, 4), st.integers(1, 4))
def test_replicas_share_a_run_and_all_have_as_many(lengths, ranks, stages):
    for run in plan_runs(lengths, 2, 96):
        shares = [micro_batches_of_rank(run, rank, ranks, stages) for rank in range(ranks)]
        (count,) = {len(share) for share in shares}
        assert count % stages == 0
        assert count * ranks < len(run.micro_batches) + ranks * stages
        dealt = [one for group in zip(*shares, strict=True) for one in group if one]
        assert tuple(dealt) == run.micro_batches
