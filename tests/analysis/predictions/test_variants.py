"""Which V and S are worth a prediction."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.analysis.predictions.scenario import blocks_of
from megatron_attnres.analysis.predictions.suggestion import ranked
from megatron_attnres.analysis.predictions.sweep import CACHED_EARLY_RELAY, SweepPoint
from megatron_attnres.analysis.predictions.variants import block_candidates, virtual_candidates


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((128, 16, 64, 16), [1, 2, 4, 8]),
        ((24, 4, 8, 4), [1, 2, 3, 6]),
        ((24, 4, 6, 4), [1]),  # groups of 4 and 2
        ((24, 4, 3, 4), [1]),
        ((24, 4, 6, 6), [1, 2, 3, 6]),
        ((25, 4, 8, 4), []),
    ],
)
def test_chunks_are_equal_and_the_schedule_takes_the_micro_batches(arguments, expected):
    assert virtual_candidates(*arguments) == expected


@pytest.mark.parametrize(
    ("sublayers", "expected"),
    [
        (256, [128, 64, 32, 16, 8, 4, 2, 1]),
        (24, [12, 6, 3, 1]),
        (54, [27, 14, 7, 1]),  # of 14 the last block has 12; no S makes 16
        (2, [1]),
    ],
)
def test_blocks_are_powers_of_two_or_single_sublayers(sublayers, expected):
    assert block_candidates(sublayers) == expected


@given(sublayers=st.integers(1, 500).map(lambda layers: 2 * layers))
def test_every_candidate_makes_a_number_of_its_own(sublayers):
    counts = [blocks_of(sublayers, size) for size in block_candidates(sublayers)]
    assert counts == sorted(set(counts))
    assert counts[-1] == sublayers
    assert all(count & (count - 1) == 0 for count in counts[:-1])


def test_what_does_not_fit_comes_last():
    points = [
        SweepPoint(virtual, 2, 4, CACHED_EARLY_RELAY, seconds, 1.0, seconds - 1, num_bytes)
        for virtual, seconds, num_bytes in ((1, 1.3, 10), (2, 1.1, 11), (4, 1.2, 10), (8, 1.0, 99))
    ]
    suggestions = ranked(points, memory_bytes=10)
    assert [(one.virtual_size, one.fits) for one in suggestions] == [
        (4, True),
        (1, True),
        (8, False),
        (2, False),
    ]
