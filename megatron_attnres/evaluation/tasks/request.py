"""Which tasks are asked for, and from which files their documents come. No torch, no harness."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_attnres.errors import InputError

ALIASES = {"wikitext2": "wikitext", "lambada": "lambada_openai"}
"""Names by which the tasks are known elsewhere."""


@dataclass(frozen=True)
class TaskRequest:
    """What to ask of the harness.

    Attributes:
        names: of tasks, groups or tags, in the harness' spelling.
        data: JSON-lines files of documents, by task, in place of the data sets.
        include_path: folder of task YAMLs of one's own.
        num_fewshot: examples in front of every question; None leaves it to the task.
        limit: documents of each task; None for all.
    """

    names: tuple[str, ...]
    data: dict[str, Path] = field(default_factory=dict)
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None


def task_names(given: str) -> tuple[str, ...]:
    """Names from ``--tasks``: separated by commas, aliases resolved, each once.

    Raises:
        InputError: there is none.
    """
    names = [name.strip() for name in given.split(",")]
    found = tuple(dict.fromkeys(ALIASES.get(name, name) for name in names if name))
    if not found:
        raise InputError(f"--tasks {given!r}: names no task; give some, such as wikitext,hellaswag")
    return found


def task_data(given: Sequence[str], names: Sequence[str]) -> dict[str, Path]:
    """Files from ``--task-data NAME=FILE.jsonl``, each checked line by line.

    Raises:
        InputError: not of this form, of a task that is not asked for, not JSON lines of objects
            with the same keys.
    """
    files: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise InputError(f"--task-data {text}: give NAME=FILE.jsonl")
        name = ALIASES.get(name, name)
        if name not in names:
            raise InputError(
                f"--task-data {text}: {name} is not asked for; --tasks has {', '.join(names)}"
            )
        if name in files:
            raise InputError(f"--task-data {text}: {name} has {files[name]} already; give one file")
        _check_json_lines(f"--task-data {text}", Path(path))
        files[name] = Path(path)
    return files


def _check_json_lines(flag: str, path: Path) -> None:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise InputError(f"{flag}: {error.strerror}; give a file of JSON lines") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{flag}: not UTF-8 ({error.reason}); give a file of JSON lines") from None
    keys: set[str] | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{flag}: line {number} is not JSON ({error})") from None
        if not isinstance(record, dict):
            raise InputError(f"{flag}: line {number} is no JSON object; one document a line")
        keys = keys or set(record)
        if set(record) != keys:
            odd = ", ".join(sorted(set(record) ^ keys))
            raise InputError(
                f"{flag}: line {number} has other keys than the lines before ({odd}); give all "
                "documents the same"
            )
    if keys is None:
        raise InputError(f"{flag}: holds no document; give one JSON object a line")
