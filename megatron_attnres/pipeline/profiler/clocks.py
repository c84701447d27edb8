"""When something happened on this rank's device, in seconds.

A mark is taken while the step runs and read as seconds afterwards: on the CPU it is the time, on
CUDA, where the host only enqueues, an event on the current stream. All host times are seconds of
``time.perf_counter``, which the processes of one Linux host share.
"""

import threading
import time
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import distributed


class Completion(Protocol):
    """The end of a transfer that is watched."""

    def wait(self) -> None:
        """Wait as the transfer's request would; raises what it raises."""
        ...

    def is_completed(self) -> bool:
        """Whether the transfer is over."""
        ...

    def mark(self) -> Any:
        """When it was over; only after ``wait``."""
        ...


class Clock(Protocol):
    """Takes marks, and turns them into seconds."""

    def mark(self) -> Any:
        """Now, in the order of the device's work."""
        ...

    def watch(self, request: distributed.Work, lane: Any) -> Completion:
        """Find out when a receive is complete; receives of a lane complete in order."""
        ...

    def begin(self) -> None:
        """Get ready for the marks of one step."""
        ...

    def end(self) -> None:
        """Wait until all marks can be read."""
        ...

    def seconds(self, mark: Any) -> float:
        """A mark on ``time.perf_counter``'s scale."""
        ...


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


class HostClock:
    """For work that is done when its call returns.

    A gloo request tells nobody when it is complete but the one that waits for it, and it may be
    waited for once: so a thread per lane waits, and the schedule waits for the thread.
    """

    def __init__(self) -> None:
        self._queues: dict[Any, SimpleQueue[_ThreadedWait]] = {}

    def mark(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def watch(self, request: distributed.Work, lane: Any) -> Completion:
        """Hand the request to the lane's thread."""
        if lane not in self._queues:
            self._queues[lane] = SimpleQueue()
            # A daemon: a receive that never comes must not keep the process alive.
            threading.Thread(
                target=_wait_in_turn, args=(self._queues[lane],), name=f"watch {lane}", daemon=True
            ).start()
        waiting = _ThreadedWait(request)
        self._queues[lane].put(waiting)
        return waiting

    def begin(self) -> None:
        """Nothing to prepare."""

    def end(self) -> None:
        """Marks are seconds already."""

    def seconds(self, mark: float) -> float:
        """The mark."""
        return mark


class _ThreadedWait:
    """A request that another thread waits for."""

    def __init__(self, request: distributed.Work) -> None:
        self._request = request
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._completed = float("nan")

    def run(self) -> None:
        """Called by the lane's thread."""
        try:
            self._request.wait()
        except BaseException as error:
            self._error = error
        self._completed = time.perf_counter()
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return self._over.is_set()

    def mark(self) -> float:
        return self._completed


def _wait_in_turn(queue: "SimpleQueue[_ThreadedWait]") -> None:
    while True:
        queue.get().run()


class CudaClock:
    """For work that a stream does later: marks are events. Not run here for want of a GPU."""

    def __init__(self) -> None:
        self._streams: dict[Any, torch.cuda.Stream] = {}
        self._origin: tuple[torch.cuda.Event, float] | None = None

    def mark(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def watch(self, request: distributed.Work, lane: Any) -> Completion:
        """Let a stream of the lane's own wait for the request, and mark it there."""
        stream = self._streams.setdefault(lane, torch.cuda.Stream())
        with torch.cuda.stream(stream):
            request.wait()
            return _StreamedWait(request, self.mark())

    def begin(self) -> None:
        """Tie the device's time to the host's."""
        torch.cuda.synchronize()
        self._origin = self.mark(), time.perf_counter()

    def end(self) -> None:
        """Events can be read when they have happened."""
        torch.cuda.synchronize()

    def seconds(self, mark: torch.cuda.Event) -> float:
        """Host time of the step's beginning and the device's time since."""
        event, seconds = self._origin
        return seconds + event.elapsed_time(mark) / 1e3


class _StreamedWait:
    """A request whose end another stream marks; a NCCL request may be waited for many times."""

    def __init__(self, request: distributed.Work, event: "torch.cuda.Event") -> None:
        self._request = request
        self._event = event

    def wait(self) -> None:
        self._request.wait()

    def is_completed(self) -> bool:
        return self._request.is_completed()

    def mark(self) -> "torch.cuda.Event":
        return self._event
