"""Brings the clocks of all ranks onto rank 0's."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import distributed

ROUND_TRIPS = 20


class ClockReading(NamedTuple):
    """How far rank 0's clock was ahead of this rank's.

    Attributes:
        at: this rank's clock, seconds.
        offset: to be added to it, seconds.
        error: half the shortest round trip, seconds: the offset is no farther off than that.
    """

    at: float
    offset: float
    error: float


@dataclass(frozen=True)
class AlignedClock:
    """Translates this rank's seconds into rank 0's: clocks drift evenly between two readings."""

    first: ClockReading
    last: ClockReading

    def __call__(self, time: float) -> float:
        """Seconds on rank 0's clock."""
        span = self.last.at - self.first.at
        passed = (time - self.first.at) / span if span > 0 else 0.0
        return time + self.first.offset + passed * (self.last.offset - self.first.offset)

    @property
    def error(self) -> float:
        """How far a translated time may be off, in seconds."""
        return max(self.first.error, self.last.error)


def read_clocks(
    group: distributed.ProcessGroup, now: Callable[[], float] = time.perf_counter
) -> ClockReading:
    """Compare this rank's clock with rank 0's. Collective over a gloo group of all ranks.

    Of several round trips the shortest one counts: rank 0 answered in its middle, give or take
    half of it.

    Args:
        group: all ranks of the job.
        now: this rank's clock, seconds.
    """
    rank = distributed.get_rank()
    for peer in range(1, distributed.get_world_size()):
        if rank == 0:
            _answer(peer, group, now)
        elif rank == peer:
            return min(
                (_ask(group, now) for _ in range(ROUND_TRIPS)), key=lambda reading: reading.error
            )
    return ClockReading(now(), 0.0, 0.0)


def _answer(peer: int, group: distributed.ProcessGroup, now: Callable[[], float]) -> None:
    message = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUND_TRIPS):
        distributed.recv(message, peer, group=group)
        message.fill_(now())
        distributed.send(message, peer, group=group)


def _ask(group: distributed.ProcessGroup, now: Callable[[], float]) -> ClockReading:
    message = torch.zeros(1, dtype=torch.float64)
    asked = now()
    distributed.send(message, 0, group=group)
    distributed.recv(message, 0, group=group)
    answered = now()
    middle = (asked + answered) / 2
    return ClockReading(middle, message.item() - middle, (answered - asked) / 2)
