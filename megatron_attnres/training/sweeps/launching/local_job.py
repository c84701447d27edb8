"""The first process of a job on this machine: runs one command and writes down how it ended.

A launcher that is killed never learns an exit status, and its successor cannot ask the system for
that of a process that it did not start. This one can, as it is the command's parent, and does
nothing else that it could die of. It holds the run's lock by inheritance and hands it on. No torch.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_attnres.training.sweeps.launching.launches import Launch, write_end, write_start
from megatron_attnres.training.watching.rank_record import host_name

# The launcher signals the whole group: what asks the command to stop must not end its witness.
OUTLIVED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(launches: Path, log: Path, command: Sequence[str]) -> None:
    """Run the command to its end.

    Args:
        launches: where starts and ends are written down.
        log: what the command prints is appended to it; in the same folder.
        command: program and arguments.
    """
    for number in OUTLIVED:
        # A handler, as the command would inherit that a signal is ignored.
        signal.signal(number, lambda *_: None)
    with log.open("ab") as output:
        host, group = host_name(), os.getpgrp()
        write_start(launches, Launch(time.time(), log.name, output.tell(), host, group))
        # Descriptors stay open: one of them is the run's lock.
        process = subprocess.Popen(command, stdout=output, stderr=output, close_fds=False)
        status = process.wait()
    write_end(launches, time.time(), status)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
