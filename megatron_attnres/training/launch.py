"""Start the ranks of a one-machine job: ``--nproc-per-node`` without torchrun.

torchrun works as well. It is not used here because it prints a report of its own for every failed
rank and always exits with status 1, which hides the one line and the status of a bad value; and
because its ranks each import for seconds what these share.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from megatron_attnres.errors import (
    EXIT_STATUS_BAD_INPUT,
    EXIT_STATUS_FAILED,
    EXIT_STATUS_GAVE_UP,
)
from megatron_attnres.training.quiet import ignore_known_warnings
from megatron_attnres.training.rank_process import POLL_SECONDS, RankProcess

# What --save-on-signal listens to.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Lets a rank dump its stacks.
STACK_SIGNAL = signal.SIGUSR2
GRACE_SECONDS = 5.0
# From a rank's death until those that miss it have reported it, which takes some heartbeats.
REPORT_SECONDS = 30.0
# From the end of the first rank, when all have done their work, to that of the last one.
END_SECONDS = 60.0


def under_launcher() -> bool:
    """Whether torchrun or this module has started this process as one of several ranks."""
    return "RANK" in os.environ


def launch(
    argv: Sequence[str],
    num_ranks: int,
    forwarded: Sequence[signal.Signals] = (),
    stopped_status: int = 0,
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Run ``argv`` as that many ranks on this machine.

    When a rank fails, or this process is asked to stop, the others are stopped too.

    Args:
        argv: script and arguments.
        num_ranks: ranks to start.
        forwarded: signals that the ranks know what to do with: they get them and are waited for.
        stopped_status: with which ranks end that were asked to, besides 0.
        prepare: does here, once, what every rank would do: they begin as copies of this process.

    Returns:
        0, the status of ranks that were asked to end, or that of the rank that failed first.
    """
    received: deque[signal.Signals] = deque()

    def note(number: int, frame: object) -> None:
        received.append(signal.Signals(number))

    # Handlers only note: whatever comes, and when, no rank is forgotten.
    listened = {signal.SIGINT, signal.SIGHUP, *STOP_SIGNALS, *forwarded}
    previous = {number: signal.signal(number, note) for number in listened}
    port = _free_port()
    threads = os.environ.get("OMP_NUM_THREADS")
    ranks: list[RankProcess] = []
    try:
        # Read when torch is imported, which may be now.
        os.environ["OMP_NUM_THREADS"] = threads or str(max(1, (os.cpu_count() or 1) // num_ranks))
        prepare()
        for rank in range(num_ranks):
            ranks.append(RankProcess(argv, _environment(rank, num_ranks, port), previous))
        return _wait(ranks, received, forwarded, stopped_status)
    finally:
        _end(ranks)
        for number, handler in previous.items():
            signal.signal(number, handler)
        if threads is None:
            os.environ.pop("OMP_NUM_THREADS", None)


def _wait(
    ranks: Sequence[RankProcess],
    received: deque[signal.Signals],
    forwarded: Sequence[signal.Signals],
    stopped_status: int,
) -> int:
    deadline: float | None = None
    while True:
        while received:
            number = received.popleft()
            if number not in forwarded:
                return 128 + number
            for rank in ranks:
                rank.send_signal(number)
        statuses = [rank.poll() for rank in ranks]
        failed = [status for status in statuses if status and status != stopped_status]
        if failed:
            return _status_of_failure(ranks, statuses, failed, received)
        if None not in statuses:
            return max(statuses)
        if any(status is not None for status in statuses) and deadline is None:
            deadline = time.monotonic() + END_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            late = [rank for rank, status in enumerate(statuses) if status is None]
            print(f"ranks {late} do not end though others have; they are stopped", file=sys.stderr)
            return EXIT_STATUS_FAILED
        time.sleep(POLL_SECONDS)


def _status_of_failure(
    ranks: Sequence[RankProcess],
    statuses: Sequence[int | None],
    failed: Sequence[int],
    received: deque[signal.Signals],
) -> int:
    """Say which rank failed, and let the others say what they know."""
    # A killed rank is why others have failed since.
    status = next((one for one in failed if one < 0), failed[0])
    if status in (EXIT_STATUS_BAD_INPUT, EXIT_STATUS_GAVE_UP):
        # All ranks end so, and rank 0, which says why, may not be the first.
        _wait_for_all(ranks, GRACE_SECONDS, received)
    else:
        print(_obituary(statuses.index(status), status), file=sys.stderr)
    if status < 0:
        _wait_for_all(ranks, REPORT_SECONDS, received)
    # A rank killed by signal n shows as -n; shells and schedulers expect 128 + n.
    return status if status > 0 else 128 - status


def _obituary(rank: int, status: int) -> str:
    """Which rank ended first: the others' tracebacks only show that it is gone."""
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"failed ({status})"
    return f"rank {rank} {how}; the other ranks are stopped"


def _wait_for_all(
    ranks: Sequence[RankProcess], seconds: float, received: deque[signal.Signals]
) -> None:
    """Return when all ranks have ended, after so long, or when somebody is impatient."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not received:
        if all(rank.poll() is not None for rank in ranks):
            return
        time.sleep(POLL_SECONDS)


def _end(ranks: Sequence[RankProcess]) -> None:
    """Stop what still runs: first politely, after a grace period for good."""
    running = [rank for rank in ranks if rank.poll() is None]
    for rank in running:
        rank.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in running:
        try:
            rank.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def import_for_ranks() -> None:
    """Import what every rank needs, as ``prepare`` of ``launch``.

    With a torch that knows CUDA nothing: a device that was asked for here could not be used there.
    """
    ignore_known_warnings()
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    # Torch's optimizers ask it whether they are being compiled.
    import torch._dynamo

    from megatron_attnres.optimizer.deepspeed_runtime import import_deepspeed
    from megatron_attnres.parallel.cpu import import_megatron_core

    import_megatron_core()
    import_deepspeed()
    import megatron_attnres.training.pretrain  # noqa: F401


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
