"""What ranks measured, brought together."""

from torch import distributed

from megatron_attnres.training.metrics import RankFigures, average, figures_of_all_ranks
from tests.distributed import run_ranks

# Sums of bytes are large: they must not be rounded as float32 rounds.
BIG = 2**40 + 1


def figures_of(rank: int) -> RankFigures:
    return RankFigures(BIG + rank, 3 * rank, 100 - rank, rank, 0.1 + rank, 0.25, rank / 3, 1e-7)


def gathered() -> list[RankFigures]:
    """Runs on every rank."""
    return figures_of_all_ranks(figures_of(distributed.get_rank()))


def test_every_rank_gets_everyone_s_figures_exactly():
    wanted = [figures_of(rank) for rank in range(3)]
    for found in run_ranks(gathered, 3):
        assert found == wanted
        assert [type(value) for value in found[1]] == [int] * 4 + [float] * 4


def test_bytes_add_up_peaks_are_the_largest_and_times_are_averaged():
    found = average([figures_of(rank) for rank in range(3)])
    assert found == {
        "p2p_bytes_forward": 3 * BIG + 3,
        "p2p_bytes_backward": 9,
        "peak_memory_bytes": 100,
        "peak_cached_sources": 2,
        "compute_seconds": 1.1,
        "p2p_wait_seconds": 0.25,
        "gradient_seconds": 1 / 3,
        "update_seconds": 1e-7,
    }
    assert isinstance(found["p2p_bytes_forward"], int)
