"""A sweep from its plan to its runs' ends, on this machine or up to Slurm's queue. No torch."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.launching import slurm
from megatron_attnres.training.sweeps.launching.local_lock import only_launcher
from megatron_attnres.training.sweeps.launching.local_sweep import LocalSweep
from megatron_attnres.training.sweeps.launching.preparation import check_runs, extended_plan
from megatron_attnres.training.sweeps.launching.progress import (
    count_of_runs,
    totals_line,
    trouble_lines,
)
from megatron_attnres.training.sweeps.launching.progress_view import ProgressView
from megatron_attnres.training.sweeps.launching.standing import Standing
from megatron_attnres.training.sweeps.launching.standing_reading import read_standings
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder


@dataclass(frozen=True)
class LaunchOptions:
    """How to launch.

    Attributes:
        jobs: runs at a time.
        threads: of each run on this machine.
        retry_failed: start also what has failed.
        sbatch_options: of the array; None to run on this machine.
    """

    jobs: int
    threads: int
    retry_failed: bool
    sbatch_options: Sequence[str] | None


@dataclass(frozen=True)
class Launched:
    """What came of it.

    Attributes:
        standings: of the grid's runs; without those that were submitted just now.
        stopped_by: the signal that asked to stop.
        is_queued: Slurm does what is left.
    """

    standings: Sequence[Standing]
    stopped_by: signal.Signals | None = None
    is_queued: bool = False


def launch_sweep(
    folder: SweepFolder,
    planned: Sequence[PlannedRun],
    options: LaunchOptions,
    view: ProgressView,
) -> Launched:
    """Do what is not done yet of a grid.

    Args:
        folder: of the sweep; another grid's runs in it stay as they are.
        planned: the grid's runs.
        options: how.
        view: where events and progress are shown.

    Raises:
        InputError: another launcher works on it, a run is planned otherwise there, or would be
            refused. Then nothing was started.
    """
    if options.sbatch_options is not None:
        slurm.check_place(folder)
    with only_launcher(folder):
        known = folder.read_plan() if folder.plan.exists() else []
        runs = extended_plan(folder, known, planned)
        in_grid = {run.name for run in planned}
        queue = read_queue(folder, runs)
        standings = [one for one in read_standings(folder, runs, queue) if one.run.name in in_grid]
        to_start = names_to_start(standings, queue, options.retry_failed)
        if options.sbatch_options is None:
            _check_not_queued(queue)
        check_runs(folder, [one.run for one in standings if one.run.name in to_start])
        dropped = [run.name for run in runs if run.name not in in_grid]
        folder.write_plan(runs, dropped)
        _say_beginning(view, standings, dropped)
        if options.sbatch_options is not None:
            return _submit(folder, runs, standings, to_start, options, view)
        sweep = LocalSweep(folder, standings, options.jobs, options.threads, view)
        stopped_by = sweep.run(to_start)
        return Launched(sweep.standings(), stopped_by)


def names_to_start(
    standings: Sequence[Standing], queue: Mapping[str, str], retry_failed: bool
) -> list[str]:
    """Runs that neither are done nor under way. Pure."""
    words = {"waiting", "interrupted", *(["failed"] if retry_failed else [])}
    return [one.run.name for one in standings if one.word in words and one.run.name not in queue]


def read_queue(folder: SweepFolder, runs: Sequence[PlannedRun]) -> dict[str, str]:
    """States of the runs in Slurm's queue by name; squeue is asked where it may know of one.

    Raises:
        InputError: it cannot be asked.
    """
    return slurm.queue_states(folder, runs) if folder.lines.exists() else {}


def _check_not_queued(queue: Mapping[str, str]) -> None:
    for name, state in queue.items():
        raise InputError(
            f"run {name}: is in Slurm's queue ({state}), as are {len(queue) - 1} others; add "
            "--slurm, or take them out with scancel"
        )


def _say_beginning(
    view: ProgressView, standings: Sequence[Standing], dropped: Sequence[str]
) -> None:
    view.say(totals_line(standings))
    for line in trouble_lines(standings):
        view.say(line)
    if dropped:
        names = ", ".join(dropped)
        view.say(f"no longer in the grid, kept as they are and not started: {names}")


def _submit(
    folder: SweepFolder,
    runs: Sequence[PlannedRun],
    standings: Sequence[Standing],
    to_start: Sequence[str],
    options: LaunchOptions,
    view: ProgressView,
) -> Launched:
    if not to_start:
        view.say("nothing to submit")
        return Launched(standings, is_queued=True)
    job = slurm.submit(folder, runs, to_start, options.jobs, options.sbatch_options or ())
    runs_in_it = count_of_runs(len(to_start))
    view.say(f"submitted: job {job}, {runs_in_it}, {options.jobs} at a time")
    left = [one for one in standings if one.run.name not in to_start]
    return Launched(left, is_queued=True)
