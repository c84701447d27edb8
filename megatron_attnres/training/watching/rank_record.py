"""What a rank says of itself, in a small file that its heartbeat writes over. No torch."""

import json
import os
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from megatron_attnres.training.watching.run_folder import RunFolder

State = Literal["running", "failed", "ended"]

# Every record fills as many bytes, so that it can be written in place: no file is made or renamed
# every few seconds by every rank. A reader that comes between sees no JSON and looks again.
RECORD_BYTES = 2048
ERROR_CHARACTERS = 400
READ_ATTEMPTS = 3


@dataclass(frozen=True)
class RankRecord:
    """A rank at one moment. Times are seconds since the epoch, on the rank's own host.

    Attributes:
        rank: global.
        host: see ``host_name``.
        pid: of its process.
        attempt: the start of the run that it belongs to.
        beat: when this was written.
        iteration, part: what it does; see activity.py.
        since: when its main thread last got on.
        waiting_for: the transfer that it waits for, if any.
        state: how it is.
        error: why it failed, in one line.
        own_fault: the error is not that of a transfer or collective.
    """

    rank: int
    host: str
    pid: int
    attempt: str
    beat: float
    iteration: int
    part: str
    since: float
    waiting_for: str | None = None
    state: State = "running"
    error: str | None = None
    own_fault: bool = False


def host_name() -> str:
    """The node's name in Slurm, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def write_record(path: Path, record: RankRecord) -> None:
    """Write in place.

    Raises:
        OSError: the system refuses.
    """
    text = _fitting_text(record)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, text.ljust(RECORD_BYTES - 1).encode() + b"\n", 0)
    finally:
        os.close(descriptor)


def _fitting_text(record: RankRecord) -> str:
    """The record as JSON. An error is cut until it fits: of some letters JSON makes twelve."""
    error = (record.error or "")[:ERROR_CHARACTERS]
    while True:
        text = json.dumps(asdict(record) | {"error": error if record.error is not None else None})
        if len(text) < RECORD_BYTES or not error:
            return text
        error = error[:-1]


def read_record(path: Path) -> RankRecord | None:
    """A record; None where there is none that can be read."""
    for _ in range(READ_ATTEMPTS):
        try:
            # A pipe of that name would never end.
            content = path.read_text(encoding="utf-8") if path.is_file() else None
            return RankRecord(**json.loads(content)) if content is not None else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, RecursionError):
            time.sleep(0.05)
    return None


def read_records(folder: RunFolder, ranks: Iterable[int], attempt: str) -> dict[int, RankRecord]:
    """The records of one start, by rank; without those that are missing or of another start.

    Their beats are the dates of the files: hosts' clocks differ, the folder has one.
    """
    records = {}
    for rank in ranks:
        path = folder.record(rank)
        record = read_record(path)
        if record is not None and record.attempt == attempt:
            with suppress(OSError):
                record = replace(record, beat=path.stat().st_mtime)
            records[rank] = record
    return records
