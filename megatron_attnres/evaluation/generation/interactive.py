"""Lines that somebody types, until there are no more or Ctrl-C. No torch."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

from megatron_attnres.errors import InputError

Prepared = TypeVar("Prepared")

PROMPT = "> "
_ENDING = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Ctrl-C, or a request to end: raised while a line is awaited, otherwise noted.

    Ranks that compute together must stop between the same two tokens: an exception would leave the
    others waiting.

    Attributes:
        noted: whether it came.
    """

    def __init__(self) -> None:
        self.noted = False
        self._waiting = False
        for number in _ENDING:
            signal.signal(number, self._note)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise KeyboardInterrupt in the body, also for what came before it."""
        self._waiting = True
        try:
            if self.noted:
                raise KeyboardInterrupt
            yield
        finally:
            self._waiting = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Once: a terminal's Ctrl-C reaches this rank, and the launcher, which asks it to end too.
        first = not self.noted
        self.noted = True
        if self._waiting and first:
            raise KeyboardInterrupt


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
    # Editing and a history, where there is a terminal to edit in.
    with suppress(ImportError):
        import readline  # noqa: F401
    at_terminal = sys.stdin.isatty()
    while (line := _next_line(PROMPT if at_terminal else "", interrupts)) is not None:
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


def _next_line(prompt: str, interrupts: Interrupts) -> str | None:
    """None where no more lines come."""
    try:
        with interrupts.raised():
            return input(prompt)
    except (EOFError, KeyboardInterrupt):
        return None
