"""Lines that somebody types, until there are no more or Ctrl-C. No torch."""

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

from megatron_attnres.errors import InputError

Prepared = TypeVar("Prepared")

PROMPT = "> "
_ENDING = (signal.SIGINT, signal.SIGTERM)
_MOST_BYTES = 1 << 16


class Interrupts:
    """Ctrl-C, or a request to end: noted, and seen by who waits for a line.

    Nothing is raised. Ranks that compute together must stop between the same two tokens: an
    exception would leave the others waiting. And a terminal's Ctrl-C reaches this rank twice, the
    second time through the launcher, while the first is being dealt with.

    Attributes:
        noted: whether it came.
        descriptor: can be read from once it came.
    """

    def __init__(self) -> None:
        self.noted = False
        self.descriptor, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in _ENDING:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True


def follow_the_first_rank() -> None:
    """For the other ranks: what ends the first one ends them, and nothing else does.

    A terminal sends Ctrl-C to all ranks, and the launcher asks all of them to end.
    """
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


def typed_lines(prepare: Callable[[str], Prepared], interrupts: Interrupts) -> Iterator[Prepared]:
    """What is made of line after line of standard input. Blank lines are passed by.

    Args:
        prepare: makes something of a line; where it raises an InputError, that is printed and the
            next line is read.
        interrupts: end it.
    """
    at_terminal = sys.stdin.isatty()
    lines = _Lines(sys.stdin.fileno(), sys.stdin.encoding, interrupts)
    while (line := lines.next(PROMPT if at_terminal else "")) is not None:
        if not line.strip():
            continue
        try:
            prepared = prepare(line)
        except InputError as error:
            print(error, file=sys.stderr, flush=True)
            continue
        yield prepared
    if at_terminal:
        # What comes next on the terminal begins a line.
        print(flush=True)


class _Lines:
    """Lines of a file descriptor, which a signal's note ends."""

    def __init__(self, descriptor: int, encoding: str, interrupts: Interrupts) -> None:
        self._descriptor = descriptor
        self._encoding = encoding
        self._interrupts = interrupts
        self._read = b""
        self._ended = False

    def next(self, prompt: str) -> str | None:
        """None where no more lines come."""
        print(prompt, end="", flush=True)
        while b"\n" not in self._read and not self._ended:
            select.select([self._descriptor, self._interrupts.descriptor], [], [])
            if self._interrupts.noted:
                return None
            piece = os.read(self._descriptor, _MOST_BYTES)
            self._ended = not piece
            self._read += piece
        if self._interrupts.noted or not self._read:
            return None
        line, _, self._read = self._read.partition(b"\n")
        return line.decode(self._encoding, "replace")
