"""Two hosts, each a network namespace with a rank, and the cable between them is pulled."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.namespaces import why_not
from tests.training.command import (
    HIDDEN_VARIABLES,
    ROOT,
    as_arguments,
    make_corpus,
    right_flags,
)

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

HOSTS = ("left", "right")
TIMEOUT_SECONDS = 9.0
HEARTBEAT_SECONDS = 0.5
# Silence that the report waits for, and the way out.
REPORT_SECONDS = 10.0


@pytest.fixture
def keepers() -> Iterator[list[subprocess.Popen]]:
    """Processes that keep two joined namespaces alive; with them these are gone."""
    with ExitStack() as stack:
        # cat says that it runs, in the new namespace, by answering.
        keepers = [
            stack.enter_context(
                subprocess.Popen(
                    ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
            for _ in HOSTS
        ]
        for keeper in keepers:
            keeper.stdin.write(b"\n")
            keeper.stdin.flush()
            assert keeper.stdout.readline() == b"\n"
        left, right = (keeper.pid for keeper in keepers)
        run_in(left, "ip", "link", "add", "eth", "type", "veth", "peer", "name", "other")
        run_in(left, "ip", "link", "set", "other", "netns", str(right), "name", "eth")
        for number, pid in enumerate((left, right), start=1):
            run_in(pid, "ip", "address", "add", f"10.0.0.{number}/24", "dev", "eth")
            for device in ("lo", "eth"):
                run_in(pid, "ip", "link", "set", device, "up")
        yield keepers


def run_in(pid: int, *command: str) -> None:
    """In the network of a process."""
    subprocess.run([*inside(pid), *command], check=True)


def inside(pid: int) -> list[str]:
    """Put before a command."""
    return ["nsenter", "--target", str(pid), "--net"]


def test_a_lost_network_ends_the_job_with_one_report(keepers, tmp_path):
    run_dir = tmp_path / "run"
    flags = right_flags(make_corpus(tmp_path, vocab_size=60)) | {
        "pipeline-model-parallel-size": 2,
        "train-iters": 10_000,
        "run-dir": run_dir,
        "distributed-timeout-minutes": TIMEOUT_SECONDS / 60,
        "heartbeat-seconds": HEARTBEAT_SECONDS,
    }
    ranks = [start_rank(rank, keeper.pid, flags) for rank, keeper in enumerate(keepers)]
    try:
        wait_for_iterations(run_dir / "metrics.jsonl", 3)
        run_in(keepers[1].pid, "ip", "link", "set", "eth", "down")
        pulled = time.monotonic()
        errors = [rank.communicate(timeout=TIMEOUT_SECONDS + REPORT_SECONDS)[1] for rank in ranks]
        assert time.monotonic() - pulled > TIMEOUT_SECONDS - 1
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert sum(error.count("[failure]") for error in errors) == 1
    assert not any("Traceback" in error for error in errors)
    (report,) = (run_dir / "failures").glob("*.txt")
    text = report.read_text()
    assert "cause    perhaps the network between ranks" in text
    seen = [line for line in text.splitlines() if line.startswith("  seen by")]
    # In a hop or a collective, wherever each of them was when the cable was pulled.
    for rank in ("rank 0 on left", "rank 1 on right"):
        assert any(rank in line and "Timed out" in line for line in seen), text


def start_rank(rank: int, pid: int, flags: dict) -> subprocess.Popen:
    """A rank on its host."""
    inherited = {name: v for name, v in os.environ.items() if name not in HIDDEN_VARIABLES}
    return subprocess.Popen(
        [*inside(pid), sys.executable, "pretrain_attnres.py", *as_arguments(flags)],
        cwd=ROOT,
        env=inherited
        | {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(HOSTS)),
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "eth",
            "SLURMD_NODENAME": HOSTS[rank],
            "OMP_NUM_THREADS": "1",
        },
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def wait_for_iterations(metrics: Path, count: int) -> None:
    """Until so many are done."""
    deadline = time.monotonic() + 60
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.1)
