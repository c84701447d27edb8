"""Points from the folders of sweeps: the validation loss at the end of every run. No torch."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_attnres.analysis.scaling_laws.measurements.comparable import check_comparable
from megatron_attnres.analysis.scaling_laws.measurements.exclusion import split_excluded
from megatron_attnres.analysis.scaling_laws.measurements.learning_rates import TriedPoint
from megatron_attnres.analysis.scaling_laws.measurements.points import Point
from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.launching.standing import Standing, with_dropped
from megatron_attnres.training.sweeps.launching.standing_reading import read_standing
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder
from megatron_attnres.training.watching.run_contents import number_in, parsed_iterations
from megatron_attnres.training.watching.run_folder import is_there

# Of the highest learning rate: above that a run is still far from where its loss would settle.
DECAYED_SHARE = 0.1
NAMED_RUNS = 4


class LossKind(StrEnum):
    """Which loss of a run."""

    DECAYED = "decayed"  # after the last iteration, and the learning rate has decayed
    FINAL = "final"  # after the last iteration


@dataclass(frozen=True)
class SweepRun:
    """A run of a plan and its folder.

    Attributes:
        path: of the folder.
        plan: of the run.
        left_grid: the newest grid of the sweep does not have it.
    """

    path: Path
    plan: PlannedRun
    left_grid: bool

    @cached_property
    def standing(self) -> Standing:
        """Without a look into Slurm's queue: what counts here is what has ended.

        Raises:
            InputError: the folder cannot be read.
        """
        found = read_standing(SweepFolder(self.path.parent), self.plan)
        return with_dropped([found], [self.plan.name] if self.left_grid else [])[0]

    @property
    def name(self) -> str:
        """As the user would find it."""
        return str(self.path)


@dataclass(frozen=True)
class Collected:
    """What sweeps hold.

    Attributes:
        tried: points with their learning rates.
        excluded: names of runs that were left out: by the user, or unfinished ones that the grid of
            their sweep no longer has.
    """

    tried: tuple[TriedPoint, ...]
    excluded: tuple[str, ...]


def collect(folders: Sequence[Path], kind: LossKind, exclude: Sequence[str]) -> Collected:
    """The losses of all runs but the excluded ones.

    Raises:
        InputError: a folder without a plan or with an empty one, a run twice, runs that are not
            finished or have no such loss, losses that are no numbers, runs measured differently.
    """
    runs = [run for folder in folders for run in _runs_of(folder)]
    kept, excluded = split_excluded(runs, lambda run: (run.plan.name, run.name), exclude)
    dropped = [run for run in kept if run.standing.word == "dropped"]
    kept = [run for run in kept if run.standing.word != "dropped"]
    _check_twice(kept)
    check_comparable([run.name for run in kept], [run.plan for run in kept])
    ends = [_end_of(run) for run in kept]
    _check_finished(kept, ends)
    tried = [_tried(run, end, kind) for run, end in zip(kept, ends, strict=True) if end]
    left_out = [run.name for run in excluded]
    left_out += [f"{run.name} (not finished, and no longer in its grid)" for run in dropped]
    return Collected(tuple(tried), tuple(left_out))


@dataclass(frozen=True)
class _End:
    """Of a run's metrics: the last iteration seen and its line, the highest learning rate, and the
    loss of the first update, before the model has learned anything; None if it is not there.
    """

    iteration: int
    line: Mapping[str, Any]
    highest: float
    first_loss: float | None


def _runs_of(folder: Path) -> Iterator[SweepRun]:
    sweep = SweepFolder(folder)
    plans, dropped = sweep.read_plan_and_dropped()
    if not plans:
        raise InputError(f"{sweep.plan}: plans no runs; give a sweep with runs")
    for plan in plans:
        yield SweepRun(sweep.run(plan.name).path, plan, plan.name in dropped)


def _check_twice(runs: Sequence[SweepRun]) -> None:
    keys = [
        (run.plan.curve, run.plan.size, run.plan.flops, run.plan.seed, run.plan.learning_rate)
        for run in runs
    ]
    twice = next((key for key, count in Counter(keys).items() if count > 1), None)
    if twice is not None:
        same = [run.name for run, key in zip(runs, keys, strict=True) if key == twice]
        raise InputError(
            f"{same[0]} and {same[1]}: are the same run (curve {twice[0]}, size {twice[1]}, seed "
            f"{twice[3]}, learning rate {twice[4]:g}); leave one out with --exclude"
        )


def _end_of(run: SweepRun) -> _End | None:
    metrics = SweepFolder(run.path.parent).run(run.plan.name).metrics
    line: Mapping[str, Any] = {}
    highest, first_loss = 0.0, None
    try:
        if not is_there(metrics):
            return None
        with metrics.open("rb") as file:
            for line in parsed_iterations(file):
                highest = max(highest, number_in(line, "learning_rate") or 0.0)
                if first_loss is None and line["iteration"] == 1:
                    first_loss = number_in(line, "lm_loss")
    except OSError as error:
        raise InputError(f"{metrics}: {error.strerror}; give a readable sweep") from None
    return _End(line["iteration"], line, highest, first_loss) if line else None


def _check_finished(runs: Sequence[SweepRun], ends: Sequence[_End | None]) -> None:
    missing = [
        f"{run.name} ({_progress(run, end)})"
        for run, end in zip(runs, ends, strict=True)
        if end is None or end.iteration < run.plan.train_iters or run.standing.word == "failed"
    ]
    if missing:
        more = f" and {len(missing) - NAMED_RUNS} more" if len(missing) > NAMED_RUNS else ""
        raise InputError(
            f"{', '.join(missing[:NAMED_RUNS])}{more}: not finished; finish them with "
            "launch_sweep.py run, failed ones with --retry-failed, or leave them out with --exclude"
        )


def _progress(run: SweepRun, end: _End | None) -> str:
    if end is None:
        return "not started"
    so_far = f"iteration {end.iteration} of {run.plan.train_iters}"
    return f"{so_far}, failed: {run.standing.error}" if run.standing.word == "failed" else so_far


def _tried(run: SweepRun, end: _End, kind: LossKind) -> TriedPoint:
    if end.iteration > run.plan.train_iters:
        raise InputError(
            f"{run.name}: has trained {end.iteration} iterations, and the plan is "
            f"{run.plan.train_iters}; leave it out with --exclude"
        )
    if "validation_loss" not in end.line:
        raise InputError(
            f"{run.name}: has no validation loss at its last iteration {end.iteration}; train with "
            "an --eval-interval that divides the iterations, or leave it out with --exclude"
        )
    loss = number_in(end.line, "validation_loss")
    if loss is None or not math.isfinite(loss):
        raise InputError(
            f"{run.name}: its validation loss is {end.line['validation_loss']}; it diverged: train "
            "it again with a lower learning rate, or leave it out with --exclude"
        )
    if end.first_loss is not None and loss >= end.first_loss:
        raise InputError(
            f"{run.name}: its validation loss {loss:.4g} is not below {end.first_loss:.4g}, its "
            "loss before it had learned anything; it diverged: train it again with a lower "
            "learning rate, or leave it out with --exclude"
        )
    if kind is LossKind.DECAYED:
        _check_decayed(run, end)
    plan = run.plan
    point = Point(plan.curve, plan.size, plan.seed, float(plan.flops), loss, run.name)
    return TriedPoint(point, plan.learning_rate)


def _check_decayed(run: SweepRun, end: _End) -> None:
    rate = number_in(end.line, "learning_rate")
    if rate is None or end.highest <= 0:
        raise InputError(
            f"{run.name}: its metrics have no learning rate, so whether it decayed is not known; "
            "give --loss final"
        )
    if rate > DECAYED_SHARE * end.highest:
        raise InputError(
            f"{run.name}: ended at {rate / end.highest:.0%} of its highest learning rate, and its "
            f"loss would fall further; train with a decay to {DECAYED_SHARE:.0%} or less, or give "
            "--loss final"
        )
