"""Step time and overhead over numbers of blocks and of virtual stages."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_attnres.analysis.predictions.comparison import STANDARD
from megatron_attnres.analysis.predictions.outcomes import job_of, outcomes_of
from megatron_attnres.analysis.predictions.scenario import Scenario
from megatron_attnres.pipeline.simulator.workload import Payload

NAIVE, CACHED_EARLY_RELAY = "naive", "cached, early relay"


@dataclass(frozen=True)
class SweepPoint:
    """One policy in one cell of the grid.

    Attributes:
        virtual_size: V.
        num_blocks: N.
        block_size: S in sublayers.
        policy: its name.
        step_seconds: predicted.
        standard_seconds: with standard residuals at the same V.
        overhead: step time over that of standard residuals, less 1.
        peak_summary_bytes: most that a rank holds of sources and partial sums at once.
    """

    virtual_size: int
    num_blocks: int
    block_size: int
    policy: str
    step_seconds: float
    standard_seconds: float
    overhead: float
    peak_summary_bytes: int


def sweep(scenarios: Sequence[Scenario], *, naive: bool = True) -> list[SweepPoint]:
    """A point per cell and policy: cached with early relay, and naive without.

    Raises:
        InputError: Megatron-Core's schedule does not take the sizes.
    """
    ways = {CACHED_EARLY_RELAY: ("cached", True)} | ({NAIVE: ("naive", False)} if naive else {})
    standards = [job_of(one, STANDARD) for one in scenarios]
    jobs = {
        name: [job_of(one, Payload(one.block_size, *way)) for one in scenarios]
        for name, way in ways.items()
    }
    outcomes = outcomes_of([*standards, *(job for of_way in jobs.values() for job in of_way)])
    points = []
    for name, of_way in jobs.items():
        for scenario, standard, job in zip(scenarios, standards, of_way, strict=True):
            seconds, peak_entries = outcomes[job]
            standard_seconds = outcomes[standard].seconds
            points.append(
                SweepPoint(
                    virtual_size=scenario.layout.virtual_pipeline,
                    num_blocks=scenario.num_blocks,
                    block_size=scenario.block_size,
                    policy=name,
                    step_seconds=seconds,
                    standard_seconds=standard_seconds,
                    overhead=seconds / standard_seconds - 1,
                    peak_summary_bytes=peak_entries * scenario.entry_bytes,
                )
            )
    return points


def as_json(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
    """For programs."""
    return [asdict(point) for point in points]


def as_table(points: Sequence[SweepPoint]) -> str:
    """For a terminal: a line per cell, the policies side by side."""
    policies = list(dict.fromkeys(point.policy for point in points))
    by_cell: dict[tuple[int, int], dict[str, SweepPoint]] = {}
    for point in points:
        by_cell.setdefault((point.virtual_size, point.block_size), {})[point.policy] = point
    titles = "".join(f"{f'{policy} ms':>24}{'overhead':>10}" for policy in policies)
    lines = [f"{'V':>3}{'blocks':>8}{'S':>5}{'standard ms':>14}{titles}"]
    for (virtual, block_size), of_policy in by_cell.items():
        first = of_policy[policies[0]]
        lines.append(
            f"{virtual:>3}{first.num_blocks:>8}{block_size:>5}"
            f"{first.standard_seconds * 1e3:>14,.2f}"
            + "".join(
                f"{of_policy[policy].step_seconds * 1e3:>24,.2f}{of_policy[policy].overhead:>10.2%}"
                for policy in policies
            )
        )
    return "\n".join(lines)
