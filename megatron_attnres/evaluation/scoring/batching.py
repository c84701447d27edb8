"""Windows of many lengths as micro-batches of few shapes. Pure, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

# Lengths are rounded up to 8 to 16 steps per power of two: at most an eighth is padding.
_STEPS_PER_DOUBLING = 8


@dataclass(frozen=True)
class Run:
    """Micro-batches of one shape.

    Attributes:
        seq_length: positions of every row.
        micro_batches: the windows in each, by index; the last one may hold fewer.
    """

    seq_length: int
    micro_batches: tuple[tuple[int, ...], ...]


def plan_runs(
    lengths: Sequence[int], batch_size: int, longest: int, multiple: int = 1
) -> list[Run]:
    """Share windows out to micro-batches.

    Which windows meet in a micro-batch, and in which shape, depends on none of the sizes of the
    layout but ``multiple``: so a window's result is the same, to the last bit, however many stages
    or replicas compute.

    Args:
        lengths: positions of each window.
        batch_size: windows of a micro-batch.
        longest: positions that the model has, a multiple of ``multiple``.
        multiple: of which every row's positions are one.

    Returns:
        Runs, the longest first: what needs the most memory shows at once.
    """
    by_length: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        padded = min(longest, padded_length(lengths[index], multiple))
        by_length.setdefault(padded, []).append(index)
    return [
        Run(
            length,
            tuple(
                tuple(indices[first : first + batch_size])
                for first in range(0, len(indices), batch_size)
            ),
        )
        for length, indices in by_length.items()
    ]


def padded_length(length: int, multiple: int = 1) -> int:
    """Positions of the rows that a window of ``length`` positions goes to."""
    step = max(_STEPS_PER_DOUBLING, 1 << length.bit_length() - 1) // _STEPS_PER_DOUBLING
    rounded = -(-length // step) * step
    return -(-rounded // multiple) * multiple


def micro_batches_of_rank(run: Run, rank: int, ranks: int, stages: int) -> list[tuple[int, ...]]:
    """The micro-batches of a run that one replica computes; the empty ones fill up.

    Args:
        run: micro-batches of all replicas.
        rank: data-parallel rank.
        ranks: data-parallel size.
        stages: 1, or P for the interleaved schedule, which takes multiples of it.

    Returns:
        As many for every rank.
    """
    own = list(run.micro_batches[rank::ranks])
    needed = -(-len(run.micro_batches) // ranks)
    needed = -(-needed // stages) * stages
    return own + [()] * (needed - len(own))
