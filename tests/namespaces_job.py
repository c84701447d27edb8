"""A script of tests/test_namespaces.py: jobs on a throttled network.

python -m tests.namespaces_job {measure,wait,nothing}
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from statistics import median

import torch
from torch import distributed

from tests.distributed import run_ranks
from tests.namespaces import ThrottledNetwork, throttled_network

RANKS = 2
BITS_PER_SECOND = 200_000_000
CORES_PER_RANK = 0.4
MESSAGE = torch.zeros(1 << 18)
TIMEOUT = 60.0


def measure(network: ThrottledNetwork) -> dict[str, float]:
    """Runs on every rank: the rate of the network, then of a slower one, and the CPU's share."""
    rate = exchange()
    network.set_rate(BITS_PER_SECOND // 4)
    slower = exchange()
    share = burn(0.5)
    return {"rate": rate, "slower": slower, "share": share}


def exchange() -> float:
    """Bits per second of messages from rank 0 to rank 1."""
    seconds = []
    answer = torch.zeros(1)
    for _ in range(6):
        distributed.barrier()
        start = time.perf_counter()
        if distributed.get_rank() == 0:
            distributed.send(MESSAGE, 1)
            distributed.recv(answer, 1)
        else:
            distributed.recv(MESSAGE, 0)
            distributed.send(answer, 0)
        seconds.append(time.perf_counter() - start)
    return 8 * MESSAGE.nbytes / median(seconds[1:])


def burn(seconds: float) -> float:
    """CPU time per time of a rank that has enough to do."""
    distributed.barrier()
    start, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        pass
    return (time.process_time() - used) / (time.perf_counter() - start)


def wait() -> None:
    """Runs on every rank: say which namespaces there are and wait for the end."""
    found = [None] * RANKS
    distributed.all_gather_object(found, os.stat("/proc/self/ns/net").st_ino)
    if distributed.get_rank() == 0:
        print(json.dumps(found), flush=True)
    time.sleep(2 * TIMEOUT)


def main() -> None:
    # A shell's background job would ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The ranks here need nothing else, and starting is most of the time.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch"])
    with throttled_network(RANKS, BITS_PER_SECOND, CORES_PER_RANK) as network:
        print(json.dumps(os.stat("/proc/self/ns/net").st_ino), flush=True)
        if sys.argv[1] == "measure":
            found = run_ranks(measure, RANKS, network, host=network, timeout=TIMEOUT)
            print(json.dumps(found), flush=True)
        elif sys.argv[1] == "wait":
            run_ranks(wait, RANKS, host=network, timeout=TIMEOUT)


if __name__ == "__main__":
    main()
