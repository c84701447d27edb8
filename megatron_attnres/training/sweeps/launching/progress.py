"""How a sweep gets on, in lines for a terminal and as JSON. Pure, no torch."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_attnres.text_table import table_lines
from megatron_attnres.training.sweeps.launching.standing import STANDING_WORDS, Standing
from megatron_attnres.training.watching.run_report import duration

HEADER = (
    "run",
    "standing",
    "iteration",
    "tokens/s",
    "loss",
    "validation",
    "time left",
)
TEXT_COLUMNS = 2


def sweep_lines(standings: Sequence[Standing]) -> Iterator[str]:
    """The table of all runs, totals, and the errors of those that failed."""
    rows = [HEADER, *(_row(one) for one in standings)]
    yield from table_lines(rows, TEXT_COLUMNS)
    yield ""
    yield totals_line(standings)
    yield from trouble_lines(standings)


def totals_line(standings: Sequence[Standing]) -> str:
    """How many runs stand how, the share of FLOPs done, the time left at the present speed."""
    counts = Counter(one.word for one in standings)
    words = [f"{counts[word]} {word}" for word in STANDING_WORDS if counts[word]]
    left = remaining_seconds(standings)
    time_left = f", about {duration(left)} left at the present speed" if left else ""
    runs = count_of_runs(len(standings))
    return f"{runs}: {', '.join(words)}; {share_done(standings):.1%} of FLOPs done{time_left}"


def trouble_lines(standings: Sequence[Standing]) -> Iterator[str]:
    """A line per run that failed or was interrupted, and why."""
    for one in standings:
        if one.word == "failed":
            yield f"failed: {one.run.name}: {one.error}"
        elif one.word == "interrupted":
            yield f"interrupted: {one.run.name}: {one.ended_by} {after_iteration(one)}"


def count_of_runs(count: int) -> str:
    """For a sentence."""
    return f"{count:,} run{'' if count == 1 else 's'}"


def running_line(standings: Sequence[Standing]) -> str:
    """Totals and what runs, short enough to be redrawn."""
    running = [
        f"{one.run.name} {one.state.iteration or 0}/{one.run.train_iters}"
        + ("" if one.state.lm_loss is None else f" loss {one.state.lm_loss:.3f}")
        for one in standings
        if one.word == "running"
    ]
    finished = sum(one.word == "finished" for one in standings)
    left = remaining_seconds(standings)
    parts = [f"{finished}/{len(standings)} runs", f"{share_done(standings):.0%} of FLOPs"]
    parts += [f"about {duration(left)} left"] if left else []
    return " | ".join([*parts, *running])


def after_iteration(standing: Standing) -> str:
    """Where it stands."""
    iteration = standing.state.iteration or 0
    return f"after iteration {iteration:,} of {standing.run.train_iters:,}"


def share_done(standings: Sequence[Standing]) -> float:
    """Of all runs' FLOPs, those that were dropped excluded, from 0 to 1."""
    wanted = [one for one in standings if one.word != "dropped"]
    whole = sum(one.run.flops for one in wanted)
    return sum(one.flops_done for one in wanted) / whole if whole else 0.0


def _is_time(seconds: float | None) -> bool:
    return seconds is not None and math.isfinite(seconds) and seconds > 0


def remaining_seconds(standings: Sequence[Standing]) -> float | None:
    """Until all runs but the failed ones are done, at the speed of those that run.

    None if none does. Validation, saves and starts come on top.
    """
    speed = sum(
        one.run.flops / one.run.train_iters / one.state.step_seconds
        for one in standings
        if one.word == "running" and _is_time(one.state.step_seconds)
    )
    left = sum(
        one.run.flops - one.flops_done for one in standings if one.word not in ("failed", "dropped")
    )
    return left / speed if speed else None


def sweep_as_dict(standings: Sequence[Standing]) -> dict[str, Any]:
    """Runs and totals by name, as JSON can hold them."""
    counts = Counter(one.word for one in standings)
    totals = {
        "runs": len(standings),
        **{word: counts[word] for word in STANDING_WORDS},
        "flops": sum(one.run.flops for one in standings),
        "share_of_flops_done": share_done(standings),
        "remaining_seconds": remaining_seconds(standings),
    }
    return {"runs": [_as_dict(one) for one in standings], "totals": totals}


def _as_dict(standing: Standing) -> dict[str, Any]:
    state = standing.state.as_dict()
    return {
        "run": standing.run.name,
        "standing": standing.word,
        "iteration": state["iteration"] or 0,
        "train_iters": standing.run.train_iters,
        "tokens": state["tokens"],
        "flops": standing.run.flops,
        "tokens_per_second": state["tokens_per_second"],
        "lm_loss": state["lm_loss"],
        "validation_loss": state["validation_loss"],
        "remaining_seconds": _seconds_left(standing),
        "error": standing.error,
        "ended_by": standing.ended_by,
    }


def _row(standing: Standing) -> tuple[str, ...]:
    state, left = standing.state, _seconds_left(standing)
    return (
        standing.run.name,
        standing.word,
        f"{state.iteration or 0:,} / {standing.run.train_iters:,}",
        _text(state.tokens_per_second, ",.0f"),
        _text(state.lm_loss, ".4f"),
        _text(state.validation_loss, ".4f"),
        "-" if left is None else duration(left),
    )


def _seconds_left(standing: Standing) -> float | None:
    step = standing.state.step_seconds
    if standing.word != "running" or not _is_time(step):
        return None
    return step * max(0, standing.run.train_iters - (standing.state.iteration or 0))


def _text(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)
