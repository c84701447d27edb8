"""Shows a terminal or a log file how a sweep gets on."""

import shutil
import time
from typing import TextIO

# Between two redrawings.
REDRAW_SECONDS = 1.0


class ProgressView:
    """A line per event; on a terminal one more below them that is redrawn.

    Args:
        output: where to.
    """

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._redraws = output.isatty()
        self._due = 0.0

    def say(self, line: str) -> None:
        """An event, which stays."""
        self._output.write(f"{self._clear()}{line}\n")
        self._output.flush()
        self._due = 0.0

    def is_due(self) -> bool:
        """Whether ``show`` has anything to draw now."""
        return self._redraws and time.monotonic() >= self._due

    def show(self, line: str) -> None:
        """What takes the place of the line shown before."""
        width = shutil.get_terminal_size().columns - 1
        self._output.write(self._clear() + line[:width])
        self._output.flush()
        self._due = time.monotonic() + REDRAW_SECONDS

    def close(self) -> None:
        """Leave nothing that would be redrawn."""
        self._output.write(self._clear())
        self._output.flush()

    def _clear(self) -> str:
        return "\r\x1b[K" if self._redraws else ""
