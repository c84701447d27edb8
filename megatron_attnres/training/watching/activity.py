"""What a rank is doing, for its heartbeat, and how long an iteration's parts take. No torch."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_attnres.pipeline.waiting import WaitClock

# In the order of an iteration: a rank in an earlier part than others is behind them.
FORWARD_BACKWARD = "forward and backward"
GRADIENTS = "summing gradients of model-parallel ranks"
UPDATE = "averaging gradients and updating weights"
MEASURING = "collecting the iteration's figures"
VALIDATING = "validating"
SAVING = "saving"
PARTS = ("starting", FORWARD_BACKWARD, GRADIENTS, UPDATE, MEASURING, VALIDATING, SAVING, "ending")
STARTING, ENDING = PARTS[0], PARTS[-1]
# Parts that may take as long as files take; all others end within the timeout of the job's groups.
MAY_TAKE_LONG = (STARTING, SAVING, ENDING)


class Activity:
    """Written by the rank's main thread; its heartbeat reads it from another.

    Args:
        synchronize: waits for the device, so that a part's time is that of its work.

    Attributes:
        iteration: under way, counted from 1; 0 before the first.
        part: of it, one of PARTS.
        since: when the main thread last got on, seconds since the epoch.
        seconds: that the iteration's parts took, by name.
        waits: tells what the main thread waits for, once there is a pipeline.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.iteration = 0
        self.part = STARTING
        self.since = time.time()
        self._got_on = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.waits: WaitClock | None = None
        self._synchronize = synchronize

    @property
    def waiting_for(self) -> str | None:
        """The transfer that the main thread waits for now, if any."""
        return self.waits.current if self.waits is not None else None

    @property
    def stuck_seconds(self) -> float:
        """Since the main thread last got on, whatever happened to the host's clock."""
        return time.monotonic() - self._got_on

    def begin(self, iteration: int) -> None:
        """An iteration starts."""
        self.iteration = iteration
        self.part = FORWARD_BACKWARD
        self.seconds = {}
        self.get_on()

    @contextmanager
    def doing(self, part: str) -> Iterator[None]:
        """A part of the iteration runs inside. If it raises, ``part`` still names it."""
        self.part = part
        self.get_on()
        begin = time.perf_counter()
        yield
        self._synchronize()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin
        self.get_on()

    def get_on(self) -> None:
        """The main thread is alive and not stuck."""
        self.since = time.time()
        self._got_on = time.monotonic()
