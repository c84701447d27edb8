"""Signals that ask a run to stop, noted from the first moment on. No torch."""

import signal
from collections.abc import Sequence


class SignalNote:
    """Remembers a signal instead of dying of it. Handlers are replaced for good.

    Torch and Megatron-Core take seconds to load: a signal that comes meanwhile counts as well.

    Args:
        signals: to listen to.

    Attributes:
        listens: whether there is anything to note.
        received: the last one; None so far.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self.listens = bool(signals)
        self.received: signal.Signals | None = None
        for number in signals:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.received = signal.Signals(number)
