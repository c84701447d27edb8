"""A rank of a one-machine job as a process, forked so that ranks share what is imported already."""

import atexit
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

POLL_SECONDS = 0.1
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # prctl(2)

Handlers = Mapping[signal.Signals, Any]


class RankProcess:
    """A running rank, with the methods of ``subprocess.Popen`` that a launcher needs.

    Args:
        argv: script and arguments, which it runs as ``python`` would.
        environment: all of its environment variables.
        handlers: of the signals that the launcher listens to: what they were before it did.
    """

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], handlers: Handlers
    ) -> None:
        self._status: int | None = None
        # Held back until the rank has handlers of its own: the launcher's would swallow them.
        held_back = signal.pthread_sigmask(signal.SIG_BLOCK, handlers.keys())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._pid = os.fork()
        if self._pid == 0:
            _run(argv, environment, handlers, held_back)
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back)

    def poll(self) -> int | None:
        """Its exit status, -n if signal n ended it; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status when it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not within ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(POLL_SECONDS / 10)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing once it has ended."""
        if self.poll() is None:
            os.kill(self._pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def _run(
    argv: Sequence[str],
    environment: Mapping[str, str],
    handlers: Handlers,
    mask: set[signal.Signals],
) -> None:
    """The life of a rank, in the new process. Never returns."""
    status = 1
    try:
        _end_with_launcher()
        # What the launcher does at its end is not for its ranks to do.
        atexit._clear()
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = _status_of(argv)
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _status_of(argv: Sequence[str]) -> int:
    """Run a script as Python does; the status that it ends with."""
    sys.argv = list(argv)
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    return 0


def _end_with_launcher() -> None:
    """Let Linux ask this rank to end when its launcher is gone, even if that is killed."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
