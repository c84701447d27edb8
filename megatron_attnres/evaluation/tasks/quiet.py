"""Libraries that talk while they work: what they say is no result of a command."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what the body prints, logs, warns of and draws as progress bars."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
