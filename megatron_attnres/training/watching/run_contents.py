"""What a run's folder says, read for whoever looks at it. No torch.

Whoever looks may come at any time: files may be missing or end in half a line, and then tell less.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_attnres.errors import InputError
from megatron_attnres.training.checkpoints.description import Description
from megatron_attnres.training.checkpoints.folders import folder_of, iterations_in
from megatron_attnres.training.watching.events import read_events
from megatron_attnres.training.watching.rank_record import RankRecord, read_record
from megatron_attnres.training.watching.run_folder import RunFolder, is_there

# Iterations whose median is shown: one that was slow does not count.
WINDOW = 20
LARGEST = 10**18
# Seconds since the epoch that a calendar has.
LATEST_TIME = 10**11


@dataclass(frozen=True)
class RunContents:
    """What a run's folder says.

    Attributes:
        folder: where it lies.
        iterations: the last lines of the metrics, ``WINDOW`` at most, the oldest first.
        validation: the last line that has a validation loss.
        events: all, the oldest first.
        records: of the newest start's ranks.
        has_report: the newest start left a failure report.
        checkpoint: iteration of the newest whole checkpoint below the folder.
        train_iters: of the run that wrote it.
    """

    folder: RunFolder
    iterations: Sequence[Mapping[str, Any]] = ()
    validation: Mapping[str, Any] | None = None
    events: Sequence[Mapping[str, Any]] = ()
    records: Sequence[RankRecord] = ()
    has_report: bool = False
    checkpoint: int | None = None
    train_iters: int | None = None


def read_run(path: Path) -> RunContents:
    """Read a run's folder.

    Raises:
        InputError: there is no such folder, it is no run's, or it cannot be read.
    """
    try:
        return _read(path)
    except OSError as error:  # a name that is too long, a file that may not be read
        raise InputError(f"{path}: {error.strerror}; give a readable --run-dir folder") from None


def parsed_iterations(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The iterations among a metrics file's lines, without what a crash left of one."""
    for line in lines:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict) and isinstance(content.get("iteration"), int):
            yield content


def number_in(line: Mapping[str, Any], name: str) -> float | None:
    """A figure of an iteration; None if it has none."""
    value = line.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Whole numbers beyond a float's range are no figures of a run.
    return value if is_number and (isinstance(value, float) or abs(value) < LARGEST) else None


def _read(path: Path) -> RunContents:
    folder = RunFolder(path)
    if not path.exists():
        raise InputError(f"{path}: no such folder; give a --run-dir folder")
    if not path.is_dir():
        raise InputError(f"{path}: is a file; give a --run-dir folder")
    parts = (folder.metrics, folder.events, folder.ranks, folder.failures, folder.checkpoints)
    if not any(part.exists() for part in parts):
        raise InputError(
            f"{path}: holds nothing that a run writes; give a folder that --run-dir names"
        )
    iterations, validation = _last_iterations(folder.metrics)
    records = _records_of_newest_start(folder)
    checkpoint = max(iterations_in(str(folder.checkpoints)), default=None)
    return RunContents(
        folder,
        iterations,
        validation,
        _events(folder.events),
        records,
        any(folder.report(one.attempt).exists() for one in records),
        checkpoint,
        _saved_train_iters(folder, checkpoint),
    )


def _last_iterations(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The end of the metrics, and the last line with a validation loss; the rest is not parsed."""
    if not is_there(path):
        return [], None
    content = path.read_bytes()
    # Two more lines than shown: the file ends with a newline or with a line that is not whole.
    lines = content.rsplit(b"\n", WINDOW + 1)[-(WINDOW + 1) :]
    validated: dict[str, Any] | None = None
    end = len(content)
    while validated is None and (found := content.rfind(b'"validation_loss"', 0, end)) >= 0:
        end = content.rfind(b"\n", 0, found) + 1
        line = content[end:].partition(b"\n")[0]
        validated = next(parsed_iterations([line]), None)
    return list(parsed_iterations(lines))[-WINDOW:], validated


def _events(path: Path) -> list[dict[str, Any]]:
    types = {"kind": str, "message": str, "iteration": int, "time": int | float}
    return [
        one
        for one in read_events(path)
        if all(isinstance(one.get(name), expected) for name, expected in types.items())
        and 0 <= one["time"] <= LATEST_TIME
    ]


def _records_of_newest_start(folder: RunFolder) -> list[RankRecord]:
    """An earlier start may have had more ranks, whose records still lie there."""
    found = [read_record(path) for path in sorted(folder.ranks.glob("rank_*.json"))]
    records = [one for one in found if one is not None and isinstance(one.beat, int | float)]
    if not records:
        return []
    newest = max(records, key=lambda one: one.beat)
    return [one for one in records if one.attempt == newest.attempt]


def _saved_train_iters(folder: RunFolder, checkpoint: int | None) -> int | None:
    if checkpoint is None:
        return None
    with suppress(InputError, KeyError, TypeError):
        saved = Description.read(folder_of(str(folder.checkpoints), checkpoint))
        found = saved.configuration["loop"]["train_iters"]
        return found if isinstance(found, int) else None
    return None
