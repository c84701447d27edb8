"""When the launcher started a run, and how that start ended: one JSON object a line. No torch.

Whoever starts a run writes here and not into memory, so that the next launcher knows as much as the
one that was killed. A job on this machine writes both its lines itself; a start without an end was
lost together with its job's first process.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_attnres.training.watching.events import read_events


@dataclass(frozen=True)
class Launch:
    """One start.

    Attributes:
        time: seconds since the epoch.
        log: file that it prints to, from the run's folder.
        log_start: bytes that the file held before.
        host: that a local job runs on; None under Slurm.
        group: process group of a local job.
        slurm_job: as squeue names it, ``123_4``; None for a local job.
        status: as ``subprocess`` reports it, -n for signal n; None if it is not known.
    """

    time: float
    log: str
    log_start: int = 0
    host: str | None = None
    group: int | None = None
    slurm_job: str | None = None
    status: int | None = None


def read_launches(path: Path) -> list[Launch]:
    """All starts, the oldest first; none if there is no file."""
    return launches_of(read_events(path))


def launches_of(lines: Iterable[Mapping[str, Any]]) -> list[Launch]:
    """From the file's objects; what is none of ours tells nothing. Pure."""
    launches: list[Launch] = []
    for line in lines:
        content = {name: value for name, value in line.items() if name != "kind"}
        if line.get("kind") == "start" and _is_whole(content):
            launches.append(Launch(**content))
        elif line.get("kind") == "end" and launches and isinstance(line.get("status"), int):
            launches[-1] = replace(launches[-1], status=line["status"])
    return launches


def write_start(path: Path, launch: Launch) -> None:
    """A start.

    Raises:
        OSError: the system refuses.
    """
    known = {name: value for name, value in vars(launch).items() if value is not None}
    _append(path, {"kind": "start", **known})


def write_end(path: Path, time: float, status: int) -> None:
    """How the last start ended.

    Raises:
        OSError: the system refuses.
    """
    _append(path, {"kind": "end", "time": time, "status": status})


def last_words(run: Path, launches: Sequence[Launch], most: int = 20) -> list[str]:
    """The last lines that the newest start printed, blank ones excluded.

    Args:
        run: its folder.
        launches: of it, the oldest first.
        most: lines.
    """
    if not launches:
        return []
    log = run / launches[-1].log
    try:
        content = log.read_bytes()[launches[-1].log_start :] if log.is_file() else b""
    except (OSError, ValueError):  # ValueError: a name that is none
        return []
    lines = content.decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()][-most:]


def _is_whole(content: Mapping[str, Any]) -> bool:
    """Whether a start has what it must have, and nothing else."""
    types = {
        "time": int | float,
        "log": str,
        "log_start": int,
        "host": str,
        "group": int,
        "slurm_job": str,
    }
    return {"time", "log"} <= set(content) and all(
        name in types and isinstance(value, types[name]) for name, value in content.items()
    )


def _append(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("ab+", buffering=0) as file:
        # A line at which a crash cut the file must not swallow this one.
        is_cut = file.seek(0, os.SEEK_END) > 0 and _last_byte(path) != b"\n"
        file.write(b"\n" * is_cut + json.dumps(content).encode() + b"\n")


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)
