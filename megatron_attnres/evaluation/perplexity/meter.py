"""How much was scored how fast, with a bar to look at meanwhile."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


class Meter:
    """Counts positions and seconds of scoring.

    Attributes:
        tokens: positions that a model computed, padding left out.
        seconds: in which it did; reading and tokenising left out.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self._bar: tqdm | None = None
        # That of now: a harness' own output may be turned elsewhere while the bar runs.
        self._stream = sys.stderr

    def advance(self, tokens: int) -> None:
        """So many more."""
        self.tokens += tokens
        if self._bar is not None:
            self._bar.update(tokens)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The body is scoring."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    @contextmanager
    def bar(self, description: str, total: int | None = None) -> Iterator[None]:
        """Show a bar on standard error while the body runs; only on a terminal.

        Args:
            description: what is measured.
            total: positions to come, None if that is not known.
        """
        # Not before half a second: an error that comes at once stands alone.
        with tqdm(
            desc=description,
            total=total,
            unit=" tokens",
            unit_scale=True,
            file=self._stream,
            disable=None,
            delay=0.5,
            leave=False,
        ) as self._bar:
            yield
        self._bar = None
