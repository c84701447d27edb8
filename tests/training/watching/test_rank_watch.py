"""How a job ends: real processes that fail, hang, are killed and stopped, and their one report."""

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from megatron_attnres.training.watching import rank_watch
from megatron_attnres.training.watching.activity import FORWARD_BACKWARD, SAVING, Activity
from megatron_attnres.training.watching.events import read_events
from megatron_attnres.training.watching.rank_record import read_record
from megatron_attnres.training.watching.rank_watch import RankWatch, dump_stacks_on_signal
from megatron_attnres.training.watching.run_folder import RunFolder
from tests.distributed import start_process

HEARTBEAT = 0.2
ATTEMPT = "first"

Deed = Callable[[Path, RankWatch, Activity], None]


def run_rank(
    folder: Path, rank: int, world_size: int, host: str, timeout: float, deed: Deed
) -> None:
    """A rank's process: watched, and with less patience than on a cluster."""
    rank_watch.SETTLE_SECONDS = rank_watch.HANG_GRACE_SECONDS = rank_watch.LEAVE_SECONDS = 0.5
    os.environ["SLURMD_NODENAME"] = host
    with (folder / f"{rank}.out").open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    activity = Activity(lambda: None)
    activity.begin(7)
    activity.part = FORWARD_BACKWARD
    watch = RankWatch(
        RunFolder(folder),
        ATTEMPT,
        rank,
        world_size,
        activity,
        HEARTBEAT,
        timeout,
        lambda: "begins anew",
    )
    watch.start()
    deed(folder, watch, activity)
    watch.close()


def works(folder: Path, watch: RankWatch, activity: Activity) -> None:
    while True:
        activity.get_on()
        time.sleep(0.05)


def hangs(folder: Path, watch: RankWatch, activity: Activity) -> None:
    time.sleep(60)


def saves_for_long(folder: Path, watch: RankWatch, activity: Activity) -> None:
    activity.part = SAVING
    time.sleep(60)


def fails(folder: Path, watch: RankWatch, activity: Activity) -> None:
    wait_for((folder / "go").exists)
    watch.fail(ValueError("no such thing"), own_fault=True)


def loses_its_peer(folder: Path, watch: RankWatch, activity: Activity) -> None:
    activity.waits = SimpleNamespace(current="receive from rank 2")
    wait_for((folder / "go").exists)
    watch.fail(ConnectionError("closed by peer"), own_fault=False)


def claims_and_dies(folder: Path, watch: RankWatch, activity: Activity) -> None:
    wait_for((folder / "go").exists)
    RunFolder(folder).claim(ATTEMPT).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def fails_after_the_claim(folder: Path, watch: RankWatch, activity: Activity) -> None:
    wait_for(RunFolder(folder).claim(ATTEMPT).exists)
    watch.fail(ConnectionError("closed by peer"), own_fault=False)


def fails_without_a_folder(folder: Path, watch: RankWatch, activity: Activity) -> None:
    wait_for((folder / "go").exists)
    shutil.rmtree(folder / "ranks")
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        watch.fail(error, own_fault=True)


def ends(folder: Path, watch: RankWatch, activity: Activity) -> None:
    time.sleep(2 * HEARTBEAT)


def wait_for(happens: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


class Job(NamedTuple):
    """Ranks that all have said that they run."""

    folder: RunFolder
    ranks: list[Any]

    def go(self) -> None:
        """Let the ranks fail that are to fail."""
        (self.folder.path / "go").touch()

    def statuses(self, of: slice = slice(None)) -> list[int]:
        """With which ranks end; they must do so soon."""
        for rank in self.ranks[of]:
            rank.join(timeout=10)
        return [rank.exitcode for rank in self.ranks[of]]

    def said(self, rank: int) -> str:
        """On stdout and stderr."""
        return (self.folder.path / f"{rank}.out").read_text()

    def report(self) -> str:
        """The only one."""
        names = sorted(path.name for path in self.folder.failures.iterdir())
        assert names == [f"{ATTEMPT}.claim", f"{ATTEMPT}.txt"]
        return self.folder.report(ATTEMPT).read_text()

    def reporters(self) -> list[int]:
        """Ranks that said the report."""
        return [rank for rank in range(len(self.ranks)) if "[failure]" in self.said(rank)]


StartJob = Callable[..., Job]


@pytest.fixture
def start_job(tmp_path) -> Iterator[StartJob]:
    folder = RunFolder(tmp_path)
    ranks = []

    def start_job(*deeds: Deed, timeout: float = 60.0, hosts: str = "aaa") -> Job:
        for rank, deed in enumerate(deeds):
            arguments = (tmp_path, rank, len(deeds), hosts[rank], timeout, deed)
            ranks.append(start_process(run_rank, *arguments))
        for rank in range(len(deeds)):
            wait_for(folder.record(rank).exists)
        return Job(folder, ranks)

    yield start_job
    for rank in ranks:
        rank.kill()


def test_an_error_ends_all_ranks_with_one_report(start_job):
    job = start_job(works, fails, works)
    job.go()
    assert job.statuses() == [1, 1, 1]
    assert job.reporters() == [1]
    assert [job.said(rank) for rank in (0, 2)] == ["", ""]
    report = job.report()
    assert report.splitlines() == [
        "training failed in iteration 7",
        "  cause    rank 1 on a: ValueError: no such thing",
        "  waiting  2 x forward and backward",
        "  next     begins anew",
        f"  stacks   {job.folder.ranks}/rank_*.stacks",
    ]
    assert report.strip() in job.said(1)
    [event] = read_events(job.folder.events)
    assert (event["kind"], event["iteration"]) == ("failure", 7)
    assert (event["ranks"], event["hosts"]) == ([1], ["a"])
    assert "ValueError: no such thing" in job.folder.stacks(1).read_text()
    assert read_record(job.folder.record(1)).state == "failed"


def test_ranks_that_fail_together_report_once(start_job):
    job = start_job(fails, fails, fails)
    job.go()
    assert job.statuses() == [1, 1, 1]
    assert len(job.reporters()) == 1
    assert "ValueError: no such thing" in job.report()


LOST = {
    "killed": (signal.SIGKILL, "aaa", r"its process \d+ is gone"),
    "stopped": (signal.SIGSTOP, "aaa", r"its process \d+ is stopped"),
    "killed elsewhere": (signal.SIGKILL, "aab", "dead, stopped or cut off"),
}


@pytest.mark.parametrize("how", LOST)
def test_a_lost_rank_is_blamed_by_those_that_miss_it(start_job, how):
    number, hosts, words = LOST[how]
    job = start_job(loses_its_peer, works, works, hosts=hosts)
    os.kill(job.ranks[2].pid, number)
    job.go()
    assert job.statuses(slice(2)) == [1, 1]
    assert job.reporters() == [0]
    cause, seen = job.report().splitlines()[1:3]
    assert re.match(rf"  cause    rank 2 on {hosts[2]}: {words}, last heartbeat \d s ago", cause)
    assert seen == ("  seen by  rank 0 on a, forward and backward: ConnectionError: closed by peer")
    if number == signal.SIGSTOP:
        os.kill(job.ranks[2].pid, signal.SIGCONT)
        assert job.statuses() == [1, 1, 1], "it finds the report and ends"


def test_a_rank_that_hangs_reports_itself_and_where(start_job):
    job = start_job(saves_for_long, hangs, works, timeout=1.0)
    assert job.statuses() == [1, 1, 1]
    assert job.reporters() == [1], "a save may take long"
    assert re.match(
        r"  cause    rank 1 on a: TimeoutError: has not got on for \d s",
        job.report().splitlines()[1],
    )
    stacks = job.folder.stacks(1).read_text()
    assert "in hangs\n" in stacks, "the main thread"
    assert "in _keep_stacks\n" in stacks, "the heartbeat"


def test_a_rank_whose_report_nobody_writes_ends_anyway(start_job):
    job = start_job(claims_and_dies, fails_after_the_claim)
    job.go()
    assert job.statuses(slice(1)) == [-signal.SIGKILL]
    assert job.statuses() == [-signal.SIGKILL, 1]
    assert list(job.folder.failures.glob("*.txt")) == []
    assert job.said(1) == (f"rank 1 failed and nobody reported it; see {job.folder.stacks(1)}\n")


def test_a_rank_that_cannot_write_ends_and_says_its_error(start_job):
    job = start_job(fails_without_a_folder)
    job.go()
    assert job.statuses() == [1]
    assert "ValueError: no such thing" in job.said(0)


def test_ranks_that_end_in_order_say_so(start_job):
    job = start_job(ends, ends)
    assert job.statuses() == [0, 0]
    assert [job.said(rank) for rank in range(2)] == ["", ""]
    for rank in range(2):
        found = read_record(job.folder.record(rank))
        assert (found.state, found.attempt, found.iteration) == ("ended", ATTEMPT, 7)
    assert list(job.folder.failures.iterdir()) == []


@pytest.fixture
def watch(tmp_path) -> Iterator[RankWatch]:
    """In this process, with a fast heartbeat."""
    activity = Activity(lambda: None)
    watch = RankWatch(RunFolder(tmp_path), ATTEMPT, 0, 1, activity, 0.02, 60.0, lambda: "")
    watch.start()
    yield watch
    watch.close()


def test_the_heart_beats(watch, tmp_path):
    path = RunFolder(tmp_path).record(0)
    first = read_record(path)
    assert (first.pid, first.state) == (os.getpid(), "running")
    wait_for(lambda: read_record(path).beat > first.beat)


def test_a_folder_that_is_gone_for_a_while_does_not_stop_the_heart(watch, tmp_path, capsys):
    folder = RunFolder(tmp_path)
    shutil.rmtree(folder.ranks)
    wait_for(lambda: "heartbeat: " in capsys.readouterr().err)
    folder.make()
    wait_for(folder.record(0).exists)


def test_a_folder_that_cannot_be_looked_into_does_not_stop_the_heart(watch, tmp_path, monkeypatch):
    def stale(path: Path) -> bool:
        raise OSError("Stale file handle")

    path = RunFolder(tmp_path).record(0)
    with monkeypatch.context() as context:
        context.setattr(Path, "exists", stale)
        time.sleep(0.1)
    before = read_record(path).beat
    wait_for(lambda: read_record(path).beat > before)


def listens(path: Path | None, output: Path) -> None:
    """A process that waits for the signal."""
    with output.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    dump_stacks_on_signal(signal.SIGUSR2, path)
    output.with_suffix(".ready").touch()
    time.sleep(60)


@pytest.mark.parametrize("has_file", [True, False])
def test_a_signal_dumps_the_stacks(tmp_path, has_file):
    path = tmp_path / "stacks" if has_file else None
    process = start_process(listens, path, tmp_path / "out")
    try:
        wait_for((tmp_path / "out.ready").exists)
        for _ in range(2):
            os.kill(process.pid, signal.SIGUSR2)
            time.sleep(0.1)
        written = path or tmp_path / "out"
        wait_for(lambda: written.read_text().count("in listens\n") == 2)
        assert process.is_alive()
    finally:
        process.kill()
