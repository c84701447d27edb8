"""Looks up how the runs of a sweep stand. No torch."""

import time
from collections.abc import Mapping, Sequence

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.launching.launches import last_words, read_launches
from megatron_attnres.training.sweeps.launching.local_lock import is_locked
from megatron_attnres.training.sweeps.launching.standing import Evidence, Standing, standing_of
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder
from megatron_attnres.training.watching.rank_record import host_name
from megatron_attnres.training.watching.run_contents import RunContents, read_run


def read_standings(
    folder: SweepFolder, runs: Sequence[PlannedRun], queue: Mapping[str, str]
) -> list[Standing]:
    """How runs stand now.

    Args:
        folder: of the sweep.
        runs: which of them.
        queue: states of Slurm jobs by run name, of those that the queue has.

    Raises:
        InputError: a folder cannot be read.
    """
    return [read_standing(folder, run, queue.get(run.name)) for run in runs]


def read_standing(folder: SweepFolder, run: PlannedRun, queue_state: str | None = None) -> Standing:
    """How one run stands now; see ``read_standings``."""
    try:
        evidence = _evidence(folder, run, queue_state)
    except OSError as error:
        path = folder.run(run.name).path
        raise InputError(f"{path}: {error.strerror}; give a readable folder") from None
    return standing_of(run, evidence, time.time())


def _evidence(folder: SweepFolder, run: PlannedRun, queue_state: str | None) -> Evidence:
    # First the lock: a job that ends in between has written all that follows.
    is_held = is_locked(folder.job_lock(run.name))
    launches = read_launches(folder.launches(run.name))
    return Evidence(
        _contents(folder, run.name),
        launches,
        last_words(folder.run(run.name).path, launches),
        is_held,
        queue_state,
        host_name(),
    )


def _contents(folder: SweepFolder, name: str) -> RunContents:
    """Of a run's folder; nothing where no start has got as far as writing."""
    run = folder.run(name)
    parts = (run.metrics, run.events, run.ranks, run.checkpoints)
    return read_run(run.path) if any(part.exists() for part in parts) else RunContents(run)
