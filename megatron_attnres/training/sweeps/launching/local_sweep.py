"""Does the runs of a sweep on this machine, so many at a time. No torch."""

import signal
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_attnres.training.signals import SignalNote
from megatron_attnres.training.sweeps.launching.local_jobs import LocalJobs
from megatron_attnres.training.sweeps.launching.progress import (
    after_iteration,
    count_of_runs,
    running_line,
)
from megatron_attnres.training.sweeps.launching.progress_view import ProgressView
from megatron_attnres.training.sweeps.launching.standing import Standing
from megatron_attnres.training.sweeps.launching.standing_reading import read_standing
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder

# What ends the launcher in order; of a second one it dies, and the jobs end by themselves.
STOPS = (signal.SIGINT, signal.SIGTERM)
POLL_SECONDS = 0.25
# Of a run that is interrupted, without anybody calling the launcher again.
TRIES = 3


class LocalSweep:
    """Starts runs, waits for them, starts again what was interrupted.

    It keeps nothing in memory that the sweep's folder does not have, so that another launcher can
    go on at any moment.

    Args:
        folder: of the sweep; its lock is held (local_lock.py).
        standings: of its runs, as read when it was decided what to start.
        jobs: runs at a time; those that already run count.
        threads: of each.
        view: where events and progress are shown.
    """

    def __init__(
        self,
        folder: SweepFolder,
        standings: Sequence[Standing],
        jobs: int,
        threads: int,
        view: ProgressView,
    ) -> None:
        self._folder = folder
        self._jobs_at_a_time = jobs
        self._jobs = LocalJobs(folder, threads)
        self._view = view
        self._standings = {one.run.name: one for one in standings}
        self._tries: Counter[str] = Counter()

    def run(self, to_start: Iterable[str]) -> signal.Signals | None:
        """Do runs, the largest first, and wait for those that run already.

        Args:
            to_start: their names.

        Returns:
            The signal that asked to stop, after which all jobs of this machine have ended.

        Raises:
            InputError: a run's folder cannot be written or read.
        """
        previous = {number: signal.getsignal(number) for number in STOPS}
        note = SignalNote(STOPS)
        waiting = sorted(to_start, key=lambda name: self._standings[name].run.flops, reverse=True)
        for name in self._running():
            self._view.say(f"runs already: {self._where(name)}")
        try:
            while note.received is None and (waiting or self._running()):
                waiting += [name for name in self._ended() if self._goes_on(name)]
                self._start_some(waiting)
                self._wait()
            if note.received is not None:
                self._stop(note.received)
        finally:
            self._view.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
        return note.received

    def standings(self) -> list[Standing]:
        """Of all runs, in the plan's order, as seen last."""
        return list(self._standings.values())

    def _running(self) -> list[str]:
        return [name for name, one in self._standings.items() if one.word == "running"]

    def _ended(self) -> list[str]:
        """Runs that ran a moment ago."""
        return [name for name in self._running() if self._look(name).word != "running"]

    def _look(self, name: str) -> Standing:
        """Read how a run stands; one whose processes live here need not be read to know that."""
        if not self._jobs.is_alive(name) or self._view.is_due():
            self._standings[name] = read_standing(self._folder, self._standings[name].run)
        return self._standings[name]

    def _goes_on(self, name: str) -> bool:
        """Say how a run ended; whether it is to be started again."""
        standing = self._standings[name]
        if standing.word == "finished":
            loss = standing.state.validation_loss
            loss = "" if loss is None else f": validation loss {loss:.4f}"
            self._view.say(f"finished: {name}{loss} ({self._count()})")
            return False
        if standing.word == "failed":
            self._view.say(f"failed: {name}: {standing.error}")
            return False
        again = self._tries[name] < TRIES
        how = f"goes on, try {self._tries[name] + 1} of {TRIES}" if again else "not tried again"
        ended_by = standing.ended_by or "lost"  # before it wrote anything
        self._view.say(f"interrupted: {self._where(name)}, {ended_by}; {how}")
        return again

    def _start_some(self, waiting: list[str]) -> None:
        while waiting and len(self._running()) < self._jobs_at_a_time:
            name = waiting.pop(0)
            if not self._jobs.start(self._standings[name]):
                # Somebody who only looks has the lock for a moment; a run that lives has it longer.
                waiting.append(name)
                return
            self._tries[name] += 1
            self._view.say(f"started: {name} {_beginning(self._standings[name])}")
            # So that it is missed, should it end before anybody looks.
            self._standings[name] = replace(self._standings[name], word="running")

    def _wait(self) -> None:
        if self._view.is_due():
            self._view.show(running_line(self.standings()))
        time.sleep(POLL_SECONDS)

    def _stop(self, number: signal.Signals) -> None:
        """Let the jobs of this machine save and end; leave all others alone."""
        for name in STOPS:
            signal.signal(name, signal.SIG_DFL)
        asked = {name for name in self._running() if self._jobs.ask_to_stop(name)}
        if asked:
            runs = count_of_runs(len(asked))
            self._view.say(
                f"{number.name}: {runs} asked to save and end; once more leaves them to themselves"
            )
        while asked & set(self._running()):
            for name in asked & set(self._ended()):
                self._view.say(f"{self._standings[name].word}: {self._where(name)}")
            self._wait()

    def _where(self, name: str) -> str:
        return f"{name} {after_iteration(self._standings[name])}"

    def _count(self) -> str:
        finished = sum(one.word == "finished" for one in self._standings.values())
        return f"{finished} of {len(self._standings)} runs"


def _beginning(standing: Standing) -> str:
    """Where a start goes on: what was done after the last save is done again."""
    saved = None if standing.lost_its_end else standing.state.checkpoint_iteration
    return f"after iteration {saved:,}" if saved else "at the beginning"
