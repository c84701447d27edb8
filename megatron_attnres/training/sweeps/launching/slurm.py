"""Hands the runs of a sweep to Slurm, as a job array over examples/slurm/sweep.sbatch. No torch.

The array's job has a name that belongs to the sweep's folder, and its indices are places in the
plan, which never change: so squeue alone tells which runs are in the queue, also those that a
launcher submitted which was killed before it could write that down.
"""

import getpass
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.launching.launches import Launch, write_start
from megatron_attnres.training.sweeps.launching.preparation import (
    REPOSITORY,
    training_arguments,
    write_flags,
)
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder

SCRIPT = "examples/slurm/sweep.sbatch"
OWN_OPTIONS = ("--array", "--job-name", "--output", "--parsable")
OWN_LETTERS = ("-a", "-J", "-o")
# Of a controller that does not answer.
TIMEOUT_SECONDS = 60.0


def check_place(folder: SweepFolder) -> None:
    """Refuse what a batch job could not find.

    Raises:
        InputError: there is no Slurm here, the folder's path has blanks, or this is not where batch
            jobs start.
    """
    if shutil.which("sbatch") is None:
        raise InputError("--slurm: there is no sbatch here; leave it out")
    path = str(folder.path.resolve())
    if len(path.split()) != 1:
        raise InputError(f"--runs-dir {path}: has blanks, at which --slurm's lines are split")
    if Path.cwd().resolve() != REPOSITORY:
        raise InputError(
            f"--slurm: batch jobs start in {REPOSITORY}, where paths in the grid may mean other "
            "files than here; call the command there"
        )


def queue_states(folder: SweepFolder, runs: Sequence[PlannedRun]) -> dict[str, str]:
    """States of the runs that the queue has, by name, as squeue names them.

    Args:
        folder: of the sweep.
        runs: all of the plan, in its order.

    Raises:
        InputError: squeue cannot be run, or fails.
    """
    if shutil.which("squeue") is None:
        raise InputError(
            f"{folder.lines}: runs of this sweep went to Slurm, and there is no squeue here to ask "
            "for them; go on where there is one, or remove the file if none is left in the queue"
        )
    user = f"--user={getpass.getuser()}"
    text = _output(["squeue", "--noheader", "--array", user, "--format=%j %K %T"])
    return states_of(text, job_name(folder), [run.name for run in runs])


def states_of(text: str, job: str, names: Sequence[str]) -> dict[str, str]:
    """From lines of job name, array index and state. Pure.

    Args:
        text: what squeue printed.
        job: name of the sweep's jobs.
        names: of the runs, by index.
    """
    rows = [line.split() for line in text.splitlines()]
    ours = [row for row in rows if len(row) == 3 and row[0] == job and row[1].isdigit()]
    return {names[int(index)]: state for _, index, state in ours if int(index) < len(names)}


def job_name(folder: SweepFolder) -> str:
    """Of the sweep's jobs, and of no other's."""
    digest = hashlib.sha256(str(folder.path.resolve()).encode()).hexdigest()
    return f"sweep-{digest[:12]}"


def submit(
    folder: SweepFolder,
    runs: Sequence[PlannedRun],
    to_start: Iterable[str],
    jobs: int,
    options: Sequence[str],
) -> str:
    """Submit an array; the id of its job.

    Args:
        folder: of the sweep.
        runs: all of the plan, in its order.
        to_start: names of those to submit.
        jobs: runs at a time.
        options: of sbatch.

    Raises:
        InputError: sbatch cannot be run or refuses, a file cannot be written.
    """
    place = SweepFolder(folder.path.resolve())
    names = [run.name for run in runs]
    indices = sorted(names.index(name) for name in to_start)
    for index in indices:
        write_flags(place, runs[index])
    is_first = not place.lines.exists()
    place.write(place.lines, "".join(_line(place, run) for run in runs))
    array = f"{','.join(map(str, indices))}%{jobs}"
    ours = [f"--array={array}", f"--job-name={job_name(place)}"]
    ours += [f"--output={place.slurm_log('%A', '%a')}"]
    command = ["sbatch", "--parsable", *options, *ours, SCRIPT, str(place.lines)]
    environment = {"PYTHON": sys.executable, **os.environ}
    environment |= {"REPOSITORY": str(REPOSITORY), "RUNS_DIR": str(place.path)}
    # Before: a job may run before sbatch has answered.
    begin = time.time()
    try:
        job = _output(command, environment).strip().split(";")[0]
    except InputError:
        if is_first:  # Slurm never heard of this sweep, and need not be asked about it.
            place.lines.unlink(missing_ok=True)
        raise
    _write_starts(place, [(index, names[index]) for index in indices], job, begin)
    return job


def sbatch_options(text: str) -> list[str]:
    """Words of ``--sbatch-options``, split as a shell does.

    Raises:
        InputError: a quote is not closed, or an option that the launcher sets itself.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"--sbatch-options {text!r}: {error}; close it") from None
    for word in words:
        if word.partition("=")[0] in OWN_OPTIONS or word[:2] in OWN_LETTERS:
            raise InputError(
                f"--sbatch-options {text!r}: {word} is the launcher's, which finds its runs by it; "
                "leave it out"
            )
    return words


def _line(folder: SweepFolder, run: PlannedRun) -> str:
    """A run for sweep.sbatch. The script adds what a job under Slurm needs, --run-dir included."""
    arguments = training_arguments(folder, run, folder.flags(run.name))
    return " ".join([run.name, *arguments]) + "\n"


def _write_starts(
    folder: SweepFolder, runs: Iterable[tuple[int, str]], job: str, begin: float
) -> None:
    for index, name in runs:
        log = f"../{folder.slurm_log(job, index).name}"
        path = folder.launches(name)
        try:
            write_start(path, Launch(begin, log, slurm_job=f"{job}_{index}"))
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; job {job} is submitted") from None


def _output(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Of one of Slurm's commands.

    Raises:
        InputError: Slurm does not answer, or refuses.
    """
    try:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"--slurm: {command[0]} does not answer; try again later") from None
    if done.returncode != 0:
        reason = "; ".join(done.stderr.split("\n")).strip("; ") or f"status {done.returncode}"
        raise InputError(f"--slurm: {command[0]}: {reason}")
    return done.stdout
