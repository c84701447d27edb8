"""Files that a command is to write: refused before it works, named when writing fails. No torch."""

import os
from collections.abc import Callable
from pathlib import Path

from megatron_attnres.errors import InputError


def check_output_file(flag: str, path: str | None) -> None:
    """Refuse what cannot become a file. Makes nothing.

    Raises:
        InputError: a folder, or a place that cannot be written.
    """
    if path is None:
        return
    target = Path(path)
    try:
        if target.is_dir():
            raise InputError(f"{flag} {path}: is a folder; give a file in it")
        if target.exists():
            if not os.access(target, os.W_OK):
                raise InputError(f"{flag} {path}: cannot be written; give a writable file")
            return
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise InputError(f"{flag} {path}: {error.strerror}; give a writable file") from None
    check_output_folder(flag, path, target.parent)


def check_output_folder(flag: str, path: str, folder: Path) -> None:
    """Refuse a folder that neither is writable nor can be made. Makes nothing.

    Args:
        flag, path: as typed, for the error.
        folder: where something is to be written.

    Raises:
        InputError: see above.
    """
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(
            f"{flag} {path}: {nearest} is no folder that can be written; give a path in one"
        )


def write_output_file(flag: str, path: str, write: Callable[[Path], None]) -> None:
    """Let ``write`` make the file, and its folder if there is none.

    Raises:
        InputError: the system refuses.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write(Path(path))
    except OSError as error:
        raise InputError(f"{flag} {path}: {error.strerror}; give a writable file") from None
