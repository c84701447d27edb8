"""The launcher of one-machine jobs, with ranks that need no torch."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_attnres.training.launch import launch
from tests.training.command import ROOT

LAUNCH = (
    "import sys; from megatron_attnres.training.launch import launch; "
    "sys.exit(launch(sys.argv[1:], 3))"
)


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


def test_a_killed_rank_shows_as_its_signal(script, capfd):
    program = script("os.kill(os.getpid(), 9) if RANK == 2 else time.sleep(60)")
    assert launch([program], 3) == 128 + signal.SIGKILL
    assert capfd.readouterr().err == "rank 2 was killed by SIGKILL; the other ranks are stopped\n"


def test_a_rank_that_ignores_the_request_to_end_is_killed(script, monkeypatch):
    monkeypatch.setattr("megatron_attnres.training.launch.GRACE_SECONDS", 0.5)
    program = script(
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(1) or sys.exit(3) if RANK == 0 else time.sleep(60)"
    )
    start = time.monotonic()
    assert launch([program], 3) == 3
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ending_the_launcher_ends_the_ranks(script, tmp_path, number):
    program = script(
        f"open({str(tmp_path)!r} + f'/pid{{RANK}}', 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    # A shell's background job, which a test run may be, hands down that SIGINT is ignored.
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, program],
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("pid*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    launcher.send_signal(number)
    assert launcher.wait(timeout=20) != 0
    for path in tmp_path.glob("pid*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_the_rank_that_explains_bad_input_may_be_the_last_to_end(script, capfd):
    program = script(
        "time.sleep(0.5 if RANK == 0 else 0)\n"
        "if RANK == 0: print('the reason', file=sys.stderr)\n"
        "sys.exit(2)"
    )
    assert launch([program], 3) == 2
    assert capfd.readouterr().err == "the reason\n"
