"""Starts runs as jobs on this machine, and stops them. No torch."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.launching import local_job
from megatron_attnres.training.sweeps.launching.launches import read_launches
from megatron_attnres.training.sweeps.launching.local_lock import is_locked, take_lock
from megatron_attnres.training.sweeps.launching.preparation import (
    REPOSITORY,
    TRAIN,
    training_arguments,
    write_flags,
)
from megatron_attnres.training.sweeps.launching.standing import Standing
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder
from megatron_attnres.training.watching.rank_record import host_name


class LocalJobs:
    """The jobs of a sweep on this machine, those included that an earlier launcher started.

    Args:
        folder: of the sweep.
        threads: of each job; its ranks share them.
    """

    def __init__(self, folder: SweepFolder, threads: int) -> None:
        self._folder = folder
        self._threads = threads
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, standing: Standing) -> bool:
        """Start a run where it stands; False if a process of its own is alive.

        The job has a session of its own: what ends the launcher or its terminal does not reach it.

        Raises:
            InputError: its folder cannot be written.
        """
        run, folder = standing.run, self._folder
        write_flags(folder, run)
        try:
            lock = take_lock(folder.job_lock(run.name))
            if lock is None:
                return False
            try:
                if standing.lost_its_end:
                    shutil.rmtree(folder.run(run.name).checkpoints)
                self._started[run.name] = self._spawn(run, lock)
            finally:
                os.close(lock)  # the job has its own of it
        except OSError as error:
            raise InputError(f"{folder.run(run.name).path}: {error.strerror}") from None
        return True

    def is_alive(self, name: str) -> bool:
        """Whether a process of a run is."""
        if name in self._started:
            self._started[name].poll()  # takes note of its end, so that the system forgets it
        return is_locked(self._folder.job_lock(name))

    def ask_to_stop(self, name: str) -> bool:
        """Let a run save and end; False if it is none of this machine's."""
        group = self._group(name)
        if group is None or not self.is_alive(name):
            return False
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
        return True

    def _spawn(self, run: PlannedRun, lock: int) -> "subprocess.Popen[bytes]":
        folder = self._folder
        flags = training_arguments(folder, run, folder.flags(run.name))
        command = [sys.executable, str(TRAIN), *flags]
        witness = [sys.executable, "-m", local_job.__name__]
        files = [str(folder.launches(run.name)), str(folder.log(run.name))]
        with folder.log(run.name).open("ab") as log:
            return subprocess.Popen(
                [*witness, *files, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(run),
                start_new_session=True,
                pass_fds=(lock,),
            )

    def _environment(self, run: PlannedRun) -> dict[str, str]:
        ranks = int(run.flags.get("nproc-per-node") or 1)
        # The package is found from wherever the launcher was called.
        places = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
            "OMP_NUM_THREADS": str(max(1, self._threads // ranks)),
        }

    def _group(self, name: str) -> int | None:
        if name in self._started:
            return self._started[name].pid
        launches = read_launches(self._folder.launches(name))
        is_here = bool(launches) and launches[-1].host == host_name()
        return launches[-1].group if is_here else None
