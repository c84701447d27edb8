"""Which virtual stages and blocks to take: candidates ranked by predicted step time."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_attnres.analysis.predictions.sizes import size_text
from megatron_attnres.analysis.predictions.sweep import SweepPoint

_NOTE = (
    "cached, early relay; overhead: over standard residuals at the same V; summaries: most sources "
    "and\npartial sums on a rank at once. The number of blocks changes the model as well."
)


@dataclass(frozen=True)
class Suggestion:
    """One candidate, cached with early relay.

    Attributes:
        virtual_size: V.
        num_blocks: N.
        block_size: S in sublayers.
        step_seconds: predicted.
        overhead: step time over that of standard residuals at the same V, less 1.
        summary_bytes: most that a rank holds of sources and partial sums at once.
        fits: whether they do not exceed the memory given to them.
    """

    virtual_size: int
    num_blocks: int
    block_size: int
    step_seconds: float
    overhead: float
    summary_bytes: int
    fits: bool


def ranked(points: Sequence[SweepPoint], memory_bytes: float) -> list[Suggestion]:
    """Those that fit, fastest first; then those that do not."""
    suggestions = [
        Suggestion(
            point.virtual_size,
            point.num_blocks,
            point.block_size,
            point.step_seconds,
            point.overhead,
            point.peak_summary_bytes,
            point.peak_summary_bytes <= memory_bytes,
        )
        for point in points
    ]
    return sorted(suggestions, key=lambda one: (not one.fits, one.step_seconds))


def as_json(suggestions: Sequence[Suggestion]) -> list[dict[str, Any]]:
    """For programs."""
    return [asdict(one) for one in suggestions]


def as_table(suggestions: Sequence[Suggestion]) -> str:
    """For a terminal."""
    lines = [f"{'V':>3}{'blocks':>8}{'S':>5}{'step ms':>13}{'overhead':>10}{'summaries':>12}  fits"]
    for one in suggestions:
        lines.append(
            f"{one.virtual_size:>3}{one.num_blocks:>8}{one.block_size:>5}"
            f"{one.step_seconds * 1e3:>13,.2f}{one.overhead:>10.2%}"
            f"{size_text(one.summary_bytes):>12}  {'yes' if one.fits else 'no'}"
        )
    return "\n".join([*lines, _NOTE])
