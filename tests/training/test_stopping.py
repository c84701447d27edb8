"""Reasons to stop: what is said, and that all ranks agree."""

import os
import signal
import time
from types import SimpleNamespace

from torch import distributed

from megatron_attnres.training import stopping
from megatron_attnres.training.signals import SignalNote
from megatron_attnres.training.stopping import StopRequest
from tests.distributed import run_ranks

NUMBERS = [signal.SIGTERM, signal.SIGUSR1]


def reasons_of_signals() -> list[str | None]:
    """Runs on every rank: before and after the last one is signalled, and with another's signal."""
    rank, last = distributed.get_rank(), distributed.get_world_size() - 1
    stop = StopRequest(SignalNote(NUMBERS), None)
    found = [stop.reason()]
    for rank_and_number in ((last, signal.SIGUSR1), (0, signal.SIGTERM)):
        if rank == rank_and_number[0]:
            os.kill(os.getpid(), rank_and_number[1])
        found.append(stop.reason())
    return found


def test_one_rank_s_signal_stops_all():
    everyone = run_ranks(reasons_of_signals, 3)
    assert everyone == [[None, "a rank got SIGUSR1", "a rank got SIGTERM"]] * 3


def reasons_of_time() -> list[str | None]:
    """Runs on every rank: the second one's clock is fast, and passes the deadline first."""
    rank = distributed.get_rank()
    moments = {"now": 0.0}
    stopping.time = SimpleNamespace(monotonic=lambda: moments["now"] * (1 + 0.1 * rank))
    stop = StopRequest(SignalNote(()), 1.5)
    found = []
    for moments["now"] in (0.0, 80.0, 85.0):
        found.append(stop.reason())
    stopping.time = time
    return found


def test_the_first_rank_that_is_late_stops_all():
    [zero, one] = run_ranks(reasons_of_time, 2)
    assert zero == one == [None, None, "--exit-duration-minutes 1.5 are over"]


def reasons_of_both() -> str | None:
    """Runs on every rank: one is signalled, all are late."""
    stop = StopRequest(SignalNote(NUMBERS), 1e-9)
    if distributed.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return stop.reason()


def test_time_that_is_over_comes_before_signals():
    assert run_ranks(reasons_of_both, 2) == ["--exit-duration-minutes 1e-09 are over"] * 2


def test_without_reasons_ranks_do_not_even_ask(monkeypatch):
    monkeypatch.setattr(distributed, "all_reduce", None)
    assert StopRequest(SignalNote(()), None).reason() is None
