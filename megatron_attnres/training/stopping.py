"""Reasons to end a run early and in order: a signal, or the time that it was given."""

import time
from signal import Signals

import torch
from torch import distributed

from megatron_attnres.parallel.cpu import device
from megatron_attnres.training.signals import SignalNote

# Above every signal's number.
_OUT_OF_TIME = 1000


class StopRequest:
    """Whether the run is to stop now. All ranks agree.

    Args:
        signals: that were noted.
        minutes: that the run may take; None for ever.
    """

    def __init__(self, signals: SignalNote, minutes: float | None) -> None:
        self._signals = signals
        self._minutes = minutes
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._is_possible = signals.listens or minutes is not None

    def reason(self, is_start: bool = False) -> str | None:
        """Why to stop: a rank was signalled or ran out of time; None to go on. Collective.

        Args:
            is_start: before the first iteration only signals count: a time that is too short for
                the start would else keep the run where it is for ever.
        """
        if not self._is_possible:
            return None
        late = not is_start and self._deadline is not None and time.monotonic() >= self._deadline
        own = _OUT_OF_TIME if late else int(self._signals.received or 0)
        asked = torch.tensor(own, device=device())
        distributed.all_reduce(asked, distributed.ReduceOp.MAX)
        found = int(asked.item())
        if found == _OUT_OF_TIME:
            return f"--exit-duration-minutes {self._minutes:g} are over"
        return f"a rank got {Signals(found).name}" if found else None
