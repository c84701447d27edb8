"""How long a rank stands still for transfers, and for which one it stands still now."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class WaitClock:
    """Times the waits of one rank's step.

    A gloo wait holds the host up and is timed there. A NCCL wait only holds the stream up: an event
    before it and one after it tell for how long.

    Args:
        device: on which the step runs.

    Attributes:
        current: what the host waits for now, None while it does not; other threads may look.
    """

    def __init__(self, device: torch.device) -> None:
        self.current: str | None = None
        self._on_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A wait runs inside; if it raises, ``current`` still says for what."""
        self.current = what
        if self._on_cuda:
            before = _event()
            yield
            self._events.append((before, _event()))
        else:
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin
        self.current = None

    def take_seconds(self) -> float:
        """All waits since the last call, in seconds. Waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize()
            self._seconds += sum(one.elapsed_time(other) / 1e3 for one, other in self._events)
            self._events = []
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _event() -> "torch.cuda.Event":
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
