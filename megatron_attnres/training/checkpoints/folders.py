"""Folders of checkpoints: written beside, renamed when whole, checked by sums, rotated.

DIR/iter_0000200/            .metadata and one .distcp file per rank (torch's format),
                             run.json, checksums.json
DIR/iter_0000300.writing/    one that is being written, or was when its run was killed
DIR/latest                   name of the newest whole one
"""

import json
import os
import shutil
from collections.abc import Iterable
from hashlib import file_digest, sha256
from pathlib import Path

from megatron_attnres.errors import InputError

LATEST = "latest"
CHECKSUMS = "checksums.json"
METADATA = ".metadata"
WRITING = ".writing"
_PREFIX = "iter_"


def folder_of(save: str, iteration: int) -> Path:
    """Where the checkpoint of an iteration lies when it is whole."""
    return Path(save) / f"{_PREFIX}{iteration:07d}"


def iterations_in(save: str) -> list[int]:
    """Iterations of the checkpoints in a folder, ascending."""
    names = [path.name.removeprefix(_PREFIX) for path in Path(save).glob(f"{_PREFIX}*")]
    return sorted(int(name) for name in names if name.isdecimal())


def remove_unfinished(save: str) -> None:
    """Remove what a killed run was writing."""
    for path in Path(save).glob(f"*{WRITING}"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def publish(writing: Path, final: Path, digests: dict[str, str]) -> None:
    """Make a written folder the newest one: sums, rename, pointer; each of them on disk at once.

    Args:
        writing: holds every file but the sums, all synced.
        final: its name from now on.
        digests: of its files, by name.
    """
    _write_synced(writing / CHECKSUMS, json.dumps(_signed(digests), indent=1))
    _sync_folder(writing)
    if final.exists():
        shutil.rmtree(final)
    writing.rename(final)
    _sync_folder(final.parent)
    point_at(final)


def point_at(final: Path) -> None:
    """Name a checkpoint in ``latest``."""
    pointer = final.parent / (LATEST + WRITING)
    _write_synced(pointer, final.name + "\n")
    pointer.replace(final.parent / LATEST)
    _sync_folder(final.parent)


def rotate(save: str, keep_last: int | None, keep_every: int | None) -> None:
    """Remove all but the newest ``keep_last`` and those of every ``keep_every``-th iteration.

    What ``latest`` names stays: a run that went back writes lower iterations than it finds.
    """
    if keep_last is None:
        return
    pointed = newest(save)
    for iteration in iterations_in(save)[:-keep_last]:
        folder = folder_of(save, iteration)
        if folder != pointed and (keep_every is None or iteration % keep_every):
            shutil.rmtree(folder, ignore_errors=True)


def newest(folder: str) -> Path:
    """The checkpoint that ``latest`` names, or the folder itself if it is one.

    Raises:
        InputError: there is none.
    """
    if (Path(folder) / CHECKSUMS).is_file():
        return Path(folder)
    pointer = Path(folder) / LATEST
    if not pointer.is_file():
        raise InputError(f"{folder} has no file {LATEST}; give a folder made by --save")
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    found = Path(folder) / name
    if not name.startswith(_PREFIX) or not found.is_dir():
        raise InputError(
            f"{pointer} names {name!r}, which is no checkpoint beside it; name one made by --save"
        )
    return found


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def digests_in(folder: Path) -> dict[str, str]:
    """The sums that were written with a checkpoint, by file.

    Raises:
        InputError: they cannot be read.
    """
    try:
        signed = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
        digests = signed["files"]
        if signed == _signed(digests):
            return digests
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise InputError(f"{folder / CHECKSUMS} is missing or damaged; use another checkpoint")


def verify(folder: Path, files: Iterable[str], digests: dict[str, str]) -> None:
    """Compare files with the sums.

    Raises:
        InputError: names the first that is missing or differs.
    """
    for name in files:
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path} is missing; use another checkpoint")
        if digest_of(path) != digests.get(name):
            raise InputError(f"{path} is damaged: its SHA-256 has changed; use another checkpoint")


def _signed(digests: dict[str, str]) -> dict[str, object]:
    """The sums with a sum of their own."""
    own = sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    return {"files": digests, "sha256_of_files": own}


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
