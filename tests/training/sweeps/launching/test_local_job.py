"""A job's first process writes down how its command ended, whatever the command ended by."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_attnres.training.sweeps.launching import local_job
from megatron_attnres.training.sweeps.launching.launches import read_launches
from megatron_attnres.training.sweeps.launching.local_lock import is_locked, take_lock
from megatron_attnres.training.watching.rank_record import host_name
from tests.training.command import ROOT

SECONDS = 30.0


class Job:
    """A shell command as a job, which holds a lock."""

    def __init__(self, folder: Path, command: str) -> None:
        self.folder = folder
        self.launches, self.log = folder / "launches.jsonl", folder / "log.txt"
        lock = take_lock(folder / "lock")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", local_job.__name__),
                *(str(self.launches), str(self.log), "sh", "-c", command),
            ],
            cwd=ROOT,
            start_new_session=True,
            pass_fds=(lock,),
        )
        os.close(lock)

    def is_held(self) -> bool:
        return is_locked(self.folder / "lock")

    def says(self, text: str) -> bool:
        return self.log.exists() and text in self.log.read_text()


@pytest.fixture
def start(tmp_path):
    """Starts jobs; what is left of them is ended."""
    jobs: list[Job] = []

    def start(command: str) -> Job:
        jobs.append(Job(tmp_path, command))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.is_held():
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("command", "status"), [("echo done", 0), ("echo no >&2; exit 3", 3), ("kill -9 $$", -9)]
)
def test_the_status_is_written_down(start, command, status):
    job = start(command)
    job.process.wait(SECONDS)
    [launch] = read_launches(job.launches)
    assert launch.status == status
    assert (launch.host, launch.group) == (host_name(), job.process.pid)
    assert not job.is_held()


def test_all_starts_append_to_one_log(start):
    for word in ("first", "second"):
        start(f"echo {word}; echo {word} >&2").process.wait(SECONDS)
    job = start("true")
    job.process.wait(SECONDS)
    assert job.log.read_text() == "first\nfirst\nsecond\nsecond\n"
    assert [one.log_start for one in read_launches(job.launches)] == [0, 12, 26]


def test_a_signal_to_the_group_ends_the_command_and_not_its_witness(start):
    job = start("echo ready; exec sleep 60")
    until(lambda: job.says("ready"))
    os.killpg(job.process.pid, signal.SIGTERM)
    assert job.process.wait(SECONDS) == 0
    assert read_launches(job.launches)[0].status == -signal.SIGTERM


def test_a_command_that_saves_first_is_waited_for(start):
    job = start("trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done")
    until(lambda: job.says("ready"))
    os.killpg(job.process.pid, signal.SIGTERM)
    job.process.wait(SECONDS)
    assert job.says("saved")
    assert read_launches(job.launches)[0].status == 0


def test_the_lock_is_held_until_the_last_process_is_gone(start):
    job = start("echo ready; exec sleep 60")
    until(lambda: job.says("ready"))
    job.process.kill()
    job.process.wait()
    assert job.is_held()
    assert read_launches(job.launches)[0].status is None
    os.killpg(job.process.pid, signal.SIGTERM)
    until(lambda: not job.is_held())
