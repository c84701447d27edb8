"""What happened in a run besides its iterations: one JSON object per line. No torch."""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from tqdm import tqdm

from megatron_attnres.training.watching.run_folder import is_there

# What somebody should look at.
AlarmKind = Literal["failure", "gave up", "skipped", "loss spike", "gradient norm", "straggler"]
ALARMS: tuple[AlarmKind, ...] = get_args(AlarmKind)
Kind = Literal["start", "stop", "end"] | AlarmKind


class EventLog:
    """Says each event on stderr and keeps it in a file.

    Args:
        path: the file; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def add(self, kind: Kind, iteration: int, message: str, **facts: Any) -> None:
        """One event; a disk that is full is no reason to stop training."""
        _say(f"[{kind}] {message}")
        if self._path is None:
            return
        event = {"time": time.time(), "kind": kind, "iteration": iteration, "message": message}
        try:
            # Appended in one piece, whatever its length: the rank that reports a failure may not be
            # the one that trains.
            with self._path.open("ab+", buffering=0) as file:
                file.write(_missing_line_end(file) + json.dumps(event | facts).encode() + b"\n")
        except OSError as error:
            _say(f"{self._path}: not written: {error.strerror}")


def _say(text: str) -> None:
    """On stderr, if anybody listens there."""
    with suppress(OSError):
        tqdm.write(text, file=sys.stderr)


def _missing_line_end(file: BinaryIO) -> bytes:
    """Of a line at which a crash cut the file: the next event must not continue it.

    A line that another rank is just writing looks the same; an empty line follows it then.
    """
    if not file.seek(0, os.SEEK_END):
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"


def read_events(path: Path) -> list[dict[str, Any]]:
    """All whole events of a file; none if there is no file."""
    if not is_there(path):
        return []
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # the line at which a crash cut the file
            continue
        if isinstance(event, dict):
            events.append(event)
    return events
