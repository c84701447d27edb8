"""Reasons to end a run early and in order: a signal, or the time that it was given."""

import signal
import time
from collections.abc import Sequence

import torch
from torch import distributed

from megatron_attnres.parallel.cpu import device


class StopRequest:
    """Whether the run is to stop after this iteration. All ranks agree.

    Args:
        signals: to listen to; their handlers are replaced for good.
        minutes: that the run may take; None for ever.
    """

    def __init__(self, signals: Sequence[signal.Signals], minutes: float | None) -> None:
        self._signalled = False
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._is_possible = bool(signals) or minutes is not None
        for number in signals:
            signal.signal(number, self._note)

    def is_set(self) -> bool:
        """Whether any rank was signalled or ran out of time. Collective."""
        if not self._is_possible:
            return False
        late = self._deadline is not None and time.monotonic() >= self._deadline
        asked = torch.tensor(int(self._signalled or late), device=device())
        distributed.all_reduce(asked, distributed.ReduceOp.MAX)
        return bool(asked.item())

    def _note(self, number: int, frame: object) -> None:
        self._signalled = True
