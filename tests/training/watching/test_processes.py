"""Whether processes run: what Linux says of made-up ones, and of real ones that are stopped."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from megatron_attnres.training.watching.processes import processes_not_running
from tests.training.watching.records import record

HERE = "node0"


def say(proc, pid: int, content: bytes) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_bytes(content)


STATES = {
    b"1000 (python) R 1 1": None,
    b"1000 (python) S 1 1": None,
    b"1000 (python) D 1 1": None,
    b"1000 (python) T 1 1": "stopped",
    b"1000 (python) t 1 1": "stopped by a debugger",
    b"1000 (python) Z 1 1": "gone",
    b"1000 (python) X 1 1": "gone",
    # Names are what programs make them.
    b"1000 (a (T) b) c) S 1 1": None,
    b"1000 (\xff\xfe) T 1 1": "stopped",
    b"1000 () ) Z 1 1": "gone",
    b"": None,
}


@pytest.mark.parametrize(("content", "wrong"), STATES.items())
def test_what_a_state_means(tmp_path, content, wrong):
    say(tmp_path, 1000, content)
    found = processes_not_running([record(0)], HERE, tmp_path)
    assert found == ({0: wrong} if wrong else {})


def test_a_process_that_is_not_there_is_gone(tmp_path):
    say(tmp_path, 1000, b"1000 (python) S 1 1")
    assert processes_not_running([record(0), record(1)], HERE, tmp_path) == {1: "gone"}


def test_a_process_that_cannot_be_looked_at_may_run(tmp_path):
    (tmp_path / "1000" / "stat").mkdir(parents=True)
    assert processes_not_running([record(0)], HERE, tmp_path) == {}


def test_processes_of_other_hosts_are_not_looked_for(tmp_path):
    assert processes_not_running([record(8), record(16)], HERE, tmp_path) == {}


def test_a_system_without_proc_tells_nothing(tmp_path):
    assert processes_not_running([record(0)], HERE, tmp_path / "nowhere") == {}


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def said_within(seconds: float, pid: int, wanted: str | None) -> str | None:
    """What is said of a real process, as soon as it is what is wanted."""
    deadline = time.monotonic() + seconds
    while True:
        said = processes_not_running([record(0, pid=pid)], HERE).get(0)
        if said == wanted or time.monotonic() > deadline:
            return said
        time.sleep(0.01)


def test_a_real_process(sleeper):
    assert said_within(0, sleeper.pid, None) is None
    sleeper.send_signal(signal.SIGSTOP)
    assert said_within(10, sleeper.pid, "stopped") == "stopped"
    sleeper.send_signal(signal.SIGCONT)
    assert said_within(10, sleeper.pid, None) is None
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert said_within(10, sleeper.pid, "gone") == "gone", "nobody has waited for it yet"
    sleeper.wait()
    assert said_within(0, sleeper.pid, "gone") == "gone"
