"""Locks that tell who is alive: the system frees them when the last process that has them ends.

A process number may be given to another process, and a file that says "running" outlives whoever
wrote it; a lock (flock(2)) does neither. It belongs to an open descriptor, which a job's processes
inherit from the launcher: so a run counts as running until the last one of them is gone, in
whatever order they and the launcher end. No torch.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder


def take_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, until it and what inherits it are closed; None if taken.

    Raises:
        OSError: the system refuses.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock. Two who ask at once do not see each other."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def only_launcher(folder: SweepFolder) -> Iterator[None]:
    """Be the only launcher of a sweep.

    Raises:
        InputError: another one works on it, or the folder cannot be written.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        descriptor = take_lock(folder.launcher_lock)
    except OSError as error:
        raise InputError(
            f"--runs-dir {folder.path}: {error.strerror}; give a writable folder"
        ) from None
    if descriptor is None:
        process = folder.launcher_lock.read_text(errors="replace").strip() or "not known"
        raise InputError(
            f"--runs-dir {folder.path}: another launcher (process {process}) works on it; wait for "
            f"its end (launch_sweep.py status {folder.path}) or give another folder"
        )
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
