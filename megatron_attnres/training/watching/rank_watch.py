"""One rank's heartbeat, and how the job ends when a rank fails, hangs or is lost.

Every rank writes what it does to a file of its own every few seconds, and looks whether the job
has been reported as failed. The first rank that meets an error claims the report, waits until the
others have said what they know, and writes it; all others end without a word. Files are used
because nothing else is left when the rank that keeps the job's store is the one that died.
"""

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from megatron_attnres.errors import EXIT_STATUS_FAILED
from megatron_attnres.pipeline.transfer import reason_of
from megatron_attnres.training.watching.activity import MAY_TAKE_LONG, Activity
from megatron_attnres.training.watching.diagnosis import (
    SILENT_INTERVALS,
    Diagnosis,
    Observation,
    diagnose,
    report_text,
)
from megatron_attnres.training.watching.events import EventLog
from megatron_attnres.training.watching.processes import processes_not_running
from megatron_attnres.training.watching.rank_record import (
    RankRecord,
    State,
    host_name,
    read_records,
    write_record,
)
from megatron_attnres.training.watching.run_folder import RunFolder

# Beyond the silence that tells a dead rank: what a busy file system may take.
SETTLE_SECONDS = 2.0
# Beyond the timeout of every wait, after which the wait's own error should have come.
HANG_GRACE_SECONDS = 10.0
# From the report until a rank that has not ended by itself is ended.
LEAVE_SECONDS = 5.0


class RankWatch:
    """Watches one rank and lets it end with the job.

    Args:
        folder: of the run.
        attempt: names this start of the run; the same on all ranks.
        rank, world_size: global.
        activity: what the rank does.
        heartbeat_seconds: between two records.
        timeout_seconds: of collectives and transfers.
        goes_on: says what the next start will do.
    """

    def __init__(
        self,
        folder: RunFolder,
        attempt: str,
        rank: int,
        world_size: int,
        activity: Activity,
        heartbeat_seconds: float,
        timeout_seconds: float,
        goes_on: Callable[[], str],
    ) -> None:
        self._folder = folder
        self._attempt = attempt
        self._rank = rank
        self._world_size = world_size
        self._activity = activity
        self._heartbeat_seconds = heartbeat_seconds
        self._timeout_seconds = timeout_seconds
        self._goes_on = goes_on
        self._stopping = threading.Event()
        self._failing = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._stacks = folder.stacks(rank)
        self._own: RankRecord | None = None

    def start(self) -> None:
        """Write the first record and go on in a thread.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder.make()
        self._say("running")
        self._thread.start()

    def close(self) -> None:
        """The rank ends in order."""
        self._stopping.set()
        self._thread.join()
        with suppress(OSError):
            self._say("ended")

    def fail(self, error: BaseException, own_fault: bool) -> NoReturn:
        """End this rank, and with it the job, with one report. Any thread may call it.

        Args:
            error: what happened here.
            own_fault: the error is not that of a transfer or collective, whose cause is elsewhere.
        """
        # Held for ever: a second failure of this rank has nothing to add.
        self._failing.acquire()
        self._stopping.set()
        try:
            message = f"{type(error).__name__}: {reason_of(error)}"
            # A disk that is full must not keep the report from being said.
            with suppress(OSError):
                self._say("failed", message, own_fault)
            try:
                self._keep_stacks(error)
            except OSError:
                traceback.print_exception(error)
            if self._claim():
                self._report()
            else:
                self._await_report()
        except BaseException:
            # Whatever goes wrong here, the rank must end: others wait for it.
            traceback.print_exc()
        finally:
            self._leave()

    def _beat(self) -> None:
        while not self._stopping.wait(self._heartbeat_seconds):
            try:
                self._say("running")
                is_over = self._folder.report(self._attempt).exists()
            except OSError as error:
                print(f"heartbeat: {error}", file=sys.stderr)
                continue
            if is_over:
                # The main thread has as long to end by itself.
                time.sleep(LEAVE_SECONDS)
                self._leave()
            stuck = self._activity.stuck_seconds
            limit = self._timeout_seconds + HANG_GRACE_SECONDS
            if stuck > limit and self._activity.part not in MAY_TAKE_LONG:
                self.fail(TimeoutError(f"has not got on for {stuck:.0f} s"), own_fault=True)

    def _say(self, state: State, error: str | None = None, own_fault: bool = False) -> None:
        activity = self._activity
        record = RankRecord(
            self._rank,
            host_name(),
            os.getpid(),
            self._attempt,
            time.time(),
            activity.iteration,
            activity.part,
            activity.since,
            activity.waiting_for,
            state,
            error,
            own_fault,
        )
        self._own = record
        write_record(self._folder.record(self._rank), record)

    def _keep_stacks(self, error: BaseException) -> None:
        """The traceback, and where all threads are: for whoever looks further than the report."""
        with self._stacks.open("a", encoding="utf-8") as file:
            file.write(f"\n{time.ctime()}, start {self._attempt}\n")
            traceback.print_exception(error, file=file)
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _claim(self) -> bool:
        try:
            self._folder.claim(self._attempt).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            # Nobody can claim it: better said several times than never.
            return True
        return True

    def _report(self) -> None:
        diagnosis, hosts = self._settled()
        text = report_text(diagnosis, hosts, self._goes_on())
        stacks = f"  stacks   {self._folder.ranks}/rank_*.stacks"
        text = f"{text}\n{stacks}"
        # First: it also goes to stderr, where a disk that is full does not matter.
        EventLog(self._folder.events).add(
            "failure",
            diagnosis.iteration,
            text,
            ranks=[suspect.rank for suspect in diagnosis.suspects],
            hosts=sorted({suspect.host for suspect in diagnosis.suspects}),
        )
        writing = self._folder.report(self._attempt).with_suffix(".writing")
        writing.write_text(f"{text}\n", encoding="utf-8")
        # Last: the others end when they see it.
        writing.rename(self._folder.report(self._attempt))

    def _settled(self) -> tuple[Diagnosis, dict[int, str]]:
        """The diagnosis, once it is certain or can become no better; and the ranks' hosts."""
        deadline = time.time() + SILENT_INTERVALS * self._heartbeat_seconds + SETTLE_SECONDS
        while True:
            records = read_records(self._folder, range(self._world_size), self._attempt)
            wrong = processes_not_running(records.values(), host_name())
            # Of a rank that could not write its record, it is known here.
            records[self._rank] = replace(self._own, beat=self._now())
            diagnosis = diagnose(
                Observation(records, self._world_size, self._now(), self._heartbeat_seconds, wrong)
            )
            if diagnosis.is_certain:
                # Ranks of the same node that died at the same moment fall silent one after another.
                deadline = min(deadline, time.time() + self._heartbeat_seconds)
            if time.time() > deadline:
                return diagnosis, {rank: one.host for rank, one in records.items()}
            time.sleep(min(0.5, self._heartbeat_seconds))

    def _now(self) -> float:
        """By the clock of the run's folder, which dates the records of all hosts."""
        own = self._folder.record(self._rank)
        try:
            os.utime(own)
            return own.stat().st_mtime
        except OSError:
            return time.time()

    def _await_report(self) -> None:
        """Another rank writes it; where that rank was lost too, nobody does."""
        wait = (SILENT_INTERVALS + 1) * self._heartbeat_seconds + SETTLE_SECONDS + LEAVE_SECONDS
        deadline = time.time() + wait
        while not self._folder.report(self._attempt).exists():
            if time.time() > deadline:
                text = f"rank {self._rank} failed and nobody reported it; see {self._stacks}"
                print(text, file=sys.stderr)
                return
            time.sleep(0.2)

    def _leave(self) -> NoReturn:
        """End without giving up process groups, which may wait for ranks that are gone."""
        for stream in (sys.stdout, sys.stderr):
            # Whoever read it may be gone.
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(EXIT_STATUS_FAILED)


def dump_stacks_on_signal(number: int, path: Path | None) -> None:
    """Let a signal write the stacks of all threads to a file, or to stderr."""
    file = path.open("a", encoding="utf-8") if path is not None else sys.stderr
    faulthandler.register(number, file=file, all_threads=True)
