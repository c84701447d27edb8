"""The launcher of one-machine jobs, with ranks that need no torch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_attnres.training.launch import _wait, launch
from tests.training.command import ROOT

LAUNCH = (
    "import signal, sys; from megatron_attnres.training.launch import launch; "
    "sys.exit(launch(sys.argv[1:], 3{}))"
)
FORWARDED = ", (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2), 7"


@pytest.fixture
def script(tmp_path):
    """Writes a rank's program and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "rank.py"
        path.write_text("import json, os, sys, time\nRANK = int(os.environ['RANK'])\n" + text)
        return str(path)

    return write


def test_ranks_get_torchrun_s_environment(script, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = script("json.dump(dict(os.environ), open(sys.argv[1] + str(RANK), 'w'))")
    assert launch([program, str(tmp_path / "env")], 3) == 0
    found = [json.loads((tmp_path / f"env{rank}").read_text()) for rank in range(3)]
    assert [one["RANK"] for one in found] == [one["LOCAL_RANK"] for one in found]
    assert {one["WORLD_SIZE"] for one in found} == {"3"}
    assert len({one["MASTER_PORT"] for one in found}) == 1
    assert found[0]["OMP_NUM_THREADS"] == str(max(1, os.cpu_count() // 3))


def test_one_rank_s_failure_ends_the_others_with_its_status(script):
    start = time.monotonic()
    assert launch([script("sys.exit(7) if RANK == 1 else time.sleep(60)")], 3) == 7
    assert time.monotonic() - start < 20


def test_a_killed_rank_shows_as_its_signal(script, capfd, monkeypatch):
    monkeypatch.setattr("megatron_attnres.training.launch.REPORT_SECONDS", 0.5)
    program = script("os.kill(os.getpid(), 9) if RANK == 2 else time.sleep(60)")
    assert launch([program], 3) == 128 + signal.SIGKILL
    assert capfd.readouterr().err == "rank 2 was killed by SIGKILL; the other ranks are stopped\n"


def test_ranks_that_miss_a_killed_one_have_time_to_report_it(script, capfd):
    program = script(
        "os.kill(os.getpid(), 9) if RANK == 2 else time.sleep(0.3 + RANK * 0.5)\n"
        "if RANK == 1: print('the report', file=sys.stderr)\n"
        "sys.exit(1)"
    )
    start = time.monotonic()
    assert launch([program], 3) == 128 + signal.SIGKILL
    assert time.monotonic() - start < 4, "no longer than they need"
    said = capfd.readouterr().err.splitlines()
    assert sorted(said) == [
        "rank 2 was killed by SIGKILL; the other ranks are stopped",
        "the report",
    ]


def test_a_rank_that_does_not_end_though_others_have_is_stopped(script, monkeypatch, capfd):
    monkeypatch.setattr("megatron_attnres.training.launch.END_SECONDS", 0.5)
    start = time.monotonic()
    assert launch([script("time.sleep(60 if RANK == 1 else 0)")], 3) == 1
    assert time.monotonic() - start < 10
    assert capfd.readouterr().err.startswith("ranks [1] do not end though others have")


def test_a_killed_rank_is_named_though_others_have_failed_of_it(capfd):
    ended = [SimpleNamespace(poll=lambda status=status: status) for status in (1, -9, 0)]
    assert _wait(ended, deque(), (), 0) == 128 + signal.SIGKILL
    assert capfd.readouterr().err == "rank 1 was killed by SIGKILL; the other ranks are stopped\n"


def test_a_rank_that_ignores_the_request_to_end_is_killed(script, monkeypatch):
    monkeypatch.setattr("megatron_attnres.training.launch.GRACE_SECONDS", 0.5)
    program = script(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(1) or sys.exit(3) if RANK == 0 else time.sleep(60)"
    )
    start = time.monotonic()
    assert launch([program], 3) == 3
    assert time.monotonic() - start < 20


@pytest.fixture
def launched(script, tmp_path):
    """Starts a launcher; returns it when its ranks run the last lines of their program."""
    launchers = []

    def launched(program: str, more: str = "") -> subprocess.Popen:
        says = f"open({str(tmp_path)!r} + f'/pid{{RANK}}', 'w').write(str(os.getpid()))\n"
        # A shell's background job, which a test run may be, hands down that SIGINT is ignored.
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCH.format(more), script(program.format(says=says))],
            cwd=ROOT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        launchers.append(launcher)
        wait_for_files(tmp_path, "pid*")
        time.sleep(0.2)
        return launcher

    yield launched
    for launcher in launchers:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(timeout=20)


def wait_for_files(folder: Path, names: str) -> None:
    deadline = time.monotonic() + 20
    while len(list(folder.glob(names))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)


def all_are_gone(folder: Path) -> bool:
    pids = [int(path.read_text()) for path in folder.glob("pid*")]
    return len(pids) == 3 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_ending_the_launcher_ends_the_ranks(launched, tmp_path, number):
    launcher = launched("{says}time.sleep(60)")
    launcher.send_signal(number)
    assert launcher.wait(timeout=20) == 128 + number
    assert all_are_gone(tmp_path)


def test_an_impatient_user_leaves_no_ranks_behind(launched, tmp_path):
    """They do not listen to the first signal, and the launcher is told a second time."""
    launcher = launched(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{says}time.sleep(60)"
    )
    for _ in range(4):
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert launcher.wait(timeout=20) == 128 + signal.SIGINT
    assert all_are_gone(tmp_path)


def test_ranks_end_with_a_launcher_that_is_killed(launched, tmp_path):
    launcher = launched("{says}time.sleep(60)")
    launcher.kill()
    launcher.wait(timeout=20)
    deadline = time.monotonic() + 10
    while not all_are_gone(tmp_path):
        assert time.monotonic() < deadline, "ranks live on"
        time.sleep(0.05)


def test_a_signal_while_ranks_are_started_leaves_none_behind(script):
    """The first rank sends it."""
    program = script(
        "import signal\nif RANK == 0: os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"
    )
    launcher = subprocess.run(
        [sys.executable, "-c", LAUNCH.format(""), program], cwd=ROOT, timeout=30, check=False
    )
    assert launcher.returncode == 128 + signal.SIGTERM
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if program in process.info["cmdline"]
    ]


# Ranks that end one after the other, rank 1 first.
STOPS_WHEN_ASKED = """
import signal
def stop(number, frame):
    time.sleep((RANK + 2) % 3 * 0.3)
    sys.exit(7)
signal.signal(signal.SIGUSR1, stop)
{says}time.sleep(60)
"""


def test_ranks_that_stop_when_asked_are_waited_for(launched, tmp_path, capfd):
    launcher = launched(STOPS_WHEN_ASKED, FORWARDED)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(timeout=20) == 7
    assert all_are_gone(tmp_path)
    assert capfd.readouterr().err == ""


def test_a_signal_for_stacks_reaches_all_ranks(launched, tmp_path):
    listens = (
        "import signal\n"
        f"def dump(number, frame): open({str(tmp_path)!r} + f'/stack{{{{RANK}}}}', 'w')\n"
        "signal.signal(signal.SIGUSR2, dump)\n"
    )
    launcher = launched(listens + "{says}while True: time.sleep(0.1)", FORWARDED)
    launcher.send_signal(signal.SIGUSR2)
    wait_for_files(tmp_path, "stack*")
    assert len(list(tmp_path.glob("stack*"))) == 3
    assert launcher.poll() is None, "the run goes on"


@pytest.mark.parametrize(("statuses", "status"), [((7, 7, 7), 7), ((0, 7, 0), 7), ((0, 0, 0), 0)])
def test_ranks_that_were_stopped_have_not_failed(script, capfd, statuses, status):
    program = script(f"time.sleep(RANK * 0.2)\nsys.exit({statuses}[RANK])")
    assert launch([program], 3, stopped_status=7) == status
    assert capfd.readouterr().err == ""


def test_a_rank_that_fails_while_others_were_stopped_has_failed(script, capfd):
    program = script("sys.exit(7) if RANK else time.sleep(0.5) or sys.exit(1)")
    assert launch([program], 3, stopped_status=7) == 1
    assert capfd.readouterr().err == "rank 0 failed (1); the other ranks are stopped\n"


@pytest.mark.parametrize("status", [2, 3])
def test_the_rank_that_says_why_all_end_may_be_the_last_to_end(script, capfd, status):
    program = script(
        "time.sleep(0.5 if RANK == 0 else 0)\n"
        "if RANK == 0: print('the reason', file=sys.stderr)\n"
        f"sys.exit({status})"
    )
    assert launch([program], 3) == status
    assert capfd.readouterr().err == "the reason\n"
