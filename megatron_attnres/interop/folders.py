"""Where a conversion reads and writes: errors that name the flag, a folder whole or not at all."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_attnres.errors import InputError
from megatron_attnres.output_files import check_output_folder

WRITING = ".writing"


def check_new_folder(given: str) -> None:
    """Refuse a ``--save`` that holds something or cannot be made. Makes nothing.

    Raises:
        InputError: see above.
    """
    path = Path(given)
    try:
        given.encode()
    except UnicodeEncodeError:
        raise InputError(f"--save {given!a}: is not UTF-8; give another name") from None
    try:
        taken = path.is_dir() and any(path.iterdir())
        taken = taken or (path.exists() and not path.is_dir())
        # Its name is longer than the folder's own.
        _writing(_absolute(given)).exists()
    except OSError as error:
        raise InputError(f"--save {given}: {error.strerror}; give a new folder") from None
    if taken:
        raise InputError(f"--save {given}: exists already; give a new folder")
    check_output_folder("--save", given, _absolute(given).parent)


@contextmanager
def reading(given: str) -> Iterator[None]:
    """Name ``--load`` in whatever is wrong with what it holds.

    Raises:
        InputError: the body raised one, or the system refuses to read.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"--load {given}: {error}") from error
    except OSError as error:
        raise InputError(f"--load {given}: {error.strerror or error}") from error


@contextmanager
def written_beside(given: str) -> Iterator[Path]:
    """Give a folder to fill, which becomes ``--save`` at the end.

    After an exception, an interrupt included, nothing of it is left, nor of parents made for it.
    What a killed run was writing goes first.

    Raises:
        InputError: the system refuses to write.
    """
    final = _absolute(given)
    writing = _writing(final)
    shutil.rmtree(writing, ignore_errors=True)
    made = [path for path in (writing, *writing.parents) if not path.exists()] or [writing]
    try:
        writing.mkdir(parents=True)
        yield writing
        writing.replace(final)
    except OSError as error:
        shutil.rmtree(made[-1], ignore_errors=True)
        reason = error.strerror or str(error)
        raise InputError(f"--save {given}: {reason}; give a folder that can be written") from error
    except BaseException:
        shutil.rmtree(made[-1], ignore_errors=True)
        raise


@contextmanager
def system_errors() -> Iterator[None]:
    """Raise as OSErrors what libraries written in Rust say of the system in a text.

    Raises:
        OSError: see above.
    """
    try:
        yield
    except Exception as error:  # tokenizers' are of no other class
        found = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, OSError) or found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error


def _absolute(given: str) -> Path:
    """Has a name and a parent, whatever was typed; behind links, which stay what they are."""
    return Path(os.path.realpath(given))


def _writing(final: Path) -> Path:
    """Beside it, so that it can be renamed."""
    return final.with_name(final.name + WRITING)
