"""How a run stands, from what its folder says. Pure, no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

from megatron_attnres.training.checkpoints.folders import folder_of
from megatron_attnres.training.watching.events import ALARMS
from megatron_attnres.training.watching.rank_record import RankRecord
from megatron_attnres.training.watching.run_contents import RunContents, number_in

StateWord = Literal["running", "finished", "stopped", "failed", "gave up", "silent", "not started"]

# A rank whose last heartbeat is older does not count as alive: a dozen of the default interval,
# so that a busy file system is no alarm.
FRESH_SECONDS = 60.0
# The last event of these kinds says how a start ended; "start" that it did not say so.
ENDED: dict[str, StateWord] = {
    "end": "finished",
    "stop": "stopped",
    "failure": "failed",
    "gave up": "gave up",
}
# Parts of a step, as the metrics name them; what is left of ``step_seconds`` is the rest.
PARTS = {
    "compute_seconds": "compute",
    "p2p_wait_seconds": "p2p wait",
    "gradient_seconds": "gradients",
    "update_seconds": "update",
}
REST = "rest_seconds"


@dataclass(frozen=True)
class RunState:
    """How a run stands; None for what its folder does not say.

    Attributes:
        name: of the folder.
        state: see ``state_word``.
        quiet_seconds: since the last heartbeat or event.
        iteration, tokens, lm_loss, grad_norm, learning_rate, peak_memory_bytes, skipped_steps: of
            the last iteration, as in ``IterationMetrics``.
        train_iters: iterations that the run is to have.
        validation_loss, validation_iteration: where validation ran last.
        window: iterations whose medians follow.
        step_seconds, tokens_per_second, tokens_per_second_per_rank, model_tflops_per_rank, mfu:
            medians, as in ``IterationMetrics``.
        step_parts: medians of the step's parts, seconds, by their names in ``IterationMetrics``;
            ``rest_seconds`` is what they leave of the step.
        remaining_seconds: iterations left at the median step time; only while running. Validation
            and saves come on top.
        checkpoint, checkpoint_iteration: the newest whole one below the folder.
        ranks: of the newest start.
        silent_ranks: those of them that should run and are not heard of.
        starts, failures: so far.
        lost: starts that nothing says the end of, the one that runs excluded.
        alarms: what somebody should look at, the oldest first; see events.py.
        failure: the newest report of a failure, or verdict that the run gave up.
    """

    name: str
    state: StateWord
    quiet_seconds: float | None
    iteration: int | None
    train_iters: int | None
    tokens: int | None
    lm_loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    validation_loss: float | None
    validation_iteration: int | None
    window: int
    step_seconds: float | None
    tokens_per_second: float | None
    tokens_per_second_per_rank: float | None
    model_tflops_per_rank: float | None
    mfu: float | None
    step_parts: Mapping[str, float]
    peak_memory_bytes: int | None
    remaining_seconds: float | None
    checkpoint: str | None
    checkpoint_iteration: int | None
    skipped_steps: int | None
    ranks: int
    silent_ranks: Sequence[int]
    starts: int
    lost: int
    failures: int
    alarms: Sequence[Mapping[str, Any]]
    failure: Mapping[str, Any] | None

    def as_dict(self) -> dict[str, Any]:
        """By name, as JSON can hold it: None for a number that is not finite too."""
        return _finite(asdict(self))


def names_of(paths: Sequence[Path]) -> list[str]:
    """What to call runs: their folders' names, or paths where two have the same name."""
    names = [path.resolve().name for path in paths]
    return [
        name if names.count(name) == 1 else str(path)
        for name, path in zip(names, paths, strict=True)
    ]


def state_of(name: str, contents: RunContents, now: float) -> RunState:
    """How a run stands. Pure.

    Args:
        name: what to call it.
        contents: of its folder.
        now: seconds since the epoch.
    """
    state = state_word(contents, now)
    last = contents.iterations[-1] if contents.iterations else {}
    validation = contents.validation or {}
    events, checkpoint = contents.events, contents.checkpoint
    failures = [one for one in events if one["kind"] == "failure"]
    verdicts = [one for one in events if one["kind"] in ("failure", "gave up")]
    train_iters = _train_iters(contents)
    step_seconds = _median(contents, "step_seconds")
    saved = str(contents.folder.checkpoints)
    return RunState(
        name=name,
        state=state,
        quiet_seconds=_quiet_seconds(contents, now),
        iteration=last.get("iteration"),
        train_iters=train_iters,
        tokens=number_in(last, "tokens"),
        lm_loss=number_in(last, "lm_loss"),
        grad_norm=number_in(last, "grad_norm"),
        learning_rate=number_in(last, "learning_rate"),
        validation_loss=number_in(validation, "validation_loss"),
        validation_iteration=validation.get("iteration"),
        window=len(contents.iterations),
        step_seconds=step_seconds,
        tokens_per_second=_median(contents, "tokens_per_second"),
        tokens_per_second_per_rank=_median(contents, "tokens_per_second_per_rank"),
        model_tflops_per_rank=_median(contents, "model_tflops_per_rank"),
        mfu=_median(contents, "mfu"),
        step_parts=_step_parts(contents),
        peak_memory_bytes=number_in(last, "peak_memory_bytes"),
        remaining_seconds=_remaining(state, last, train_iters, step_seconds),
        checkpoint=str(folder_of(saved, checkpoint)) if checkpoint is not None else None,
        checkpoint_iteration=checkpoint,
        skipped_steps=number_in(last, "skipped_steps"),
        ranks=len(contents.records),
        silent_ranks=sorted(
            one.rank
            for one in contents.records
            if one.state == "running" and not _is_fresh(one, now)
        ),
        starts=sum(one["kind"] == "start" for one in events),
        lost=_lost_starts([one["kind"] for one in events], state == "running"),
        failures=len(failures),
        alarms=[one for one in events if one["kind"] in ALARMS],
        failure=verdicts[-1] if verdicts else None,
    )


def state_word(contents: RunContents, now: float) -> StateWord:
    """One word for a run. Pure.

    ``running``: a rank of the newest start says that it runs, has said so in the last
    ``FRESH_SECONDS``, and the start has not been reported as failed. ``finished``, ``stopped``,
    ``failed``, ``gave up``: so says the last event about the run as a whole. ``silent``: the run
    has started and nothing says how it ended; it was killed, its nodes are gone, or it was refused
    before its first iteration. ``not started``: nothing says that a rank ever ran.
    """
    running = [one for one in contents.records if one.state == "running"]
    if contents.has_report:
        # Ranks that end because of a report do not take their "running" back.
        running = []
    if any(_is_fresh(one, now) for one in running):
        return "running"
    courses = [one for one in contents.events if one["kind"] in ("start", *ENDED)]
    if not courses:
        return "silent" if contents.records or contents.iterations else "not started"
    last = courses[-1]
    if any(one.beat > last["time"] + FRESH_SECONDS for one in running):
        # Of a later start, which was lost before it said that it began.
        return "silent"
    return ENDED.get(last["kind"], "silent")


def _train_iters(contents: RunContents) -> int | None:
    """As the newest start says; else as the checkpoint does."""
    said = [one.get("train_iters") for one in contents.events if one["kind"] == "start"]
    return next((one for one in reversed(said) if isinstance(one, int)), contents.train_iters)


def _is_fresh(record: RankRecord, now: float) -> bool:
    return now - record.beat <= FRESH_SECONDS


def _lost_starts(kinds: Sequence[str], is_running: bool) -> int:
    courses = [kind for kind in kinds if kind == "start" or kind in ENDED]
    lost = sum(one == other == "start" for one, other in pairwise(courses))
    return lost + (courses[-1:] == ["start"] and not is_running)


def _quiet_seconds(contents: RunContents, now: float) -> float | None:
    signs = [one.beat for one in contents.records] + [one["time"] for one in contents.events]
    # The clocks of two hosts are never quite the same.
    return max(0.0, now - max(signs)) if signs else None


def _median(contents: RunContents, name: str) -> float | None:
    values = [number_in(line, name) for line in contents.iterations]
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _step_parts(contents: RunContents) -> dict[str, float]:
    steps = [_parts_of(line) for line in contents.iterations]
    whole = [parts for parts in steps if parts]
    return {name: median(parts[name] for parts in whole) for name in (*PARTS, REST) if whole}


def _parts_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step by part; empty if the line lacks one."""
    step = number_in(line, "step_seconds")
    parts = {name: number_in(line, name) for name in PARTS}
    if step is None or None in parts.values():
        return {}
    # Ranks' averages may add up to a little more than the step of the rank that writes.
    return parts | {REST: max(0.0, step - sum(parts.values()))}


def _remaining(
    state: StateWord,
    last: Mapping[str, Any],
    train_iters: int | None,
    step_seconds: float | None,
) -> float | None:
    if state != "running" or train_iters is None or step_seconds is None:
        return None
    return step_seconds * max(0, train_iters - last["iteration"])


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
