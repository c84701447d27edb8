"""A plan for people and for programs. Pure, no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, islice
from typing import Any

from megatron_attnres.text_table import table_lines
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.sweeps.planning.budgets import FLOPS_PER_PFLOPS_DAY
from megatron_attnres.training.sweeps.planning.shapes import SIZE_FLAGS
from megatron_attnres.training.sweeps.planning.throughput import Throughput

HEADER = ("run", "parameters", "non-embedding", "iterations", "tokens", "FLOPs", "PFLOP/s-days")


def plan_lines(runs: Sequence[PlannedRun], throughput: Throughput | None) -> Iterator[str]:
    """A line for every run, those of a size together, and the totals.

    Args:
        runs: of the plan, at least one.
        throughput: adds hours; None adds none.
    """
    header = (*HEADER, "hours") if throughput else HEADER
    cells = [header, *(_row(run, throughput) for run in runs), _total_row(runs, throughput)]
    lines = table_lines(cells, text_columns=1)
    yield next(lines)
    for _, group in groupby(runs, key=lambda run: run.size):
        of_size = list(group)
        yield f"\n{_size_line(of_size[0])}"
        yield from islice(lines, len(of_size))
    yield f"\n{next(lines)}"
    yield from _notes(runs, throughput)


def plan_as_dict(runs: Sequence[PlannedRun], throughput: Throughput | None) -> dict[str, Any]:
    """The runs and their totals, with ``hours`` where a throughput is given."""
    flops = [run.flops for run in runs]
    totals = {
        "runs": len(runs),
        "tokens": sum(run.tokens for run in runs),
        "flops": sum(flops),
        "pflops_days": sum(flops) / FLOPS_PER_PFLOPS_DAY,
    }
    if throughput is None:
        return {"runs": [asdict(run) for run in runs], "totals": totals}
    return {
        "runs": [asdict(run) | {"hours": throughput.hours(run.flops)} for run in runs],
        "totals": totals | {"hours": throughput.hours_in_total(flops)},
    }


def _row(run: PlannedRun, throughput: Throughput | None) -> tuple[str, ...]:
    cells = (
        run.name,
        f"{run.parameters:,}",
        f"{run.non_embedding_parameters:,}",
        f"{run.train_iters:,}",
        f"{run.tokens:,}",
        *_compute(run.flops),
    )
    return (*cells, _hours(throughput.hours(run.flops))) if throughput else cells


def _total_row(runs: Sequence[PlannedRun], throughput: Throughput | None) -> tuple[str, ...]:
    flops = [run.flops for run in runs]
    tokens = sum(run.tokens for run in runs)
    count = f"{len(runs):,} run{'' if len(runs) == 1 else 's'}"
    cells = (count, "", "", "", f"{tokens:,}", *_compute(sum(flops)))
    return (*cells, _hours(throughput.hours_in_total(flops))) if throughput else cells


def _size_line(run: PlannedRun) -> str:
    """What makes the size, as far as flags give it."""
    given = [f"{name} {run.flags[name]}" for name in SIZE_FLAGS if name in run.flags]
    return f"{run.size}: {', '.join(given)}"


def _notes(runs: Sequence[PlannedRun], throughput: Throughput | None) -> Iterator[str]:
    cut = {
        (run.size, run.curve): run.flags["attn-res-block-size"]
        for run in runs
        if "attn-res-block-size" in run.flags
    }
    for (size, curve), sublayers in cut.items():
        yield (
            f"note: {size} {curve}: its sublayers cannot be cut into as many blocks of equal size; "
            f"takes blocks of {sublayers} sublayers"
        )
    if throughput is not None:
        at_a_time = f"{throughput.jobs} run{'' if throughput.jobs == 1 else 's'} at a time"
        yield f"hours at {throughput.tflops:g} TFLOP/s of each run; in total with {at_a_time}"


def _compute(flops: int) -> tuple[str, str]:
    return f"{flops:.3e}", f"{flops / FLOPS_PER_PFLOPS_DAY:.3g}"


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 100 else f"{hours:.3g}"
