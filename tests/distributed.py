"""The launcher of multi-process tests: ranks from a warm fork server, cleaned up whatever happens.

Importing torch, DeepSpeed and Megatron-Core takes seconds per process. The fork server imports
them once; every rank of every test is then forked from it in milliseconds.
"""

import faulthandler
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])

GROUP_TIMEOUT = timedelta(seconds=60)


class RankHost(Protocol):
    """Where the ranks of a job live, if not simply on this machine."""

    store_address: str

    def enter(self, rank: int) -> None:
        """Runs in the rank's process before it joins the job."""

    def attach(self, rank: int, pid: int) -> None:
        """Runs in the test process once the rank's process was started."""


class RankError(AssertionError):
    """A rank raised, died or did not finish; carries the ranks' tracebacks."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 300.0,
    host: RankHost | None = None,
) -> list[Any]:
    """Call ``function(*arguments)`` on every rank of a new gloo job and return the results.

    Args:
        function: a module-level function; torch.distributed is initialised when it runs and each
            rank computes with one thread.
        world_size: ranks.
        arguments: picklable, the same on every rank.
        timeout: seconds after which the ranks are killed.
        host: where they live, picklable; None for this machine.

    Raises:
        RankError: with the traceback of every rank that failed.
    """
    results: Any = _CONTEXT.Queue()
    port = _free_port()
    processes = [
        _CONTEXT.Process(
            target=_rank_main,
            args=(function, arguments, rank, world_size, port, results, os.getpid(), host),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        if host is not None:
            for rank, process in enumerate(processes):
                host.attach(rank, process.pid)
        return _collect(processes, results, time.monotonic() + timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join(timeout=10)


def start_process(function: Callable[..., None], *arguments: Any) -> Any:
    """Start a warm process of its own, without a job, that calls ``function(*arguments)``."""
    process = _CONTEXT.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def _collect(processes: list[Any], results: Any, deadline: float) -> list[Any]:
    answers: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(answers) + len(failures) < len(processes):
        try:
            rank, answer, failure = results.get(timeout=0.2)
        except queue.Empty:
            for rank, process in enumerate(processes):
                died = process.exitcode not in (None, 0)
                if died and rank not in answers and rank not in failures:
                    failures[rank] = f"died with exit code {process.exitcode}"
            if time.monotonic() > deadline:
                missing = sorted(set(range(len(processes))) - set(answers) - set(failures))
                failures |= dict.fromkeys(missing, "did not finish in time; stack on stderr")
                _dump_stacks(processes[rank] for rank in missing)
            continue
        if failure is None:
            answers[rank] = pickle.loads(answer)
        else:
            failures[rank] = failure
            # The others may now wait for this rank: give them a moment to say so themselves.
            deadline = min(deadline, time.monotonic() + 5)
    if failures:
        text = "\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures))
        raise RankError(text)
    return [answers[rank] for rank in range(len(processes))]


def _dump_stacks(processes: Iterable[Any]) -> None:
    """Make ranks say on stderr where they hang."""
    for process in processes:
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)


def _rank_main(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    results: Any,
    tester: int,
    host: RankHost | None,
) -> None:
    import torch
    from torch import distributed

    faulthandler.register(signal.SIGUSR1)
    threading.Thread(target=_end_with, args=(tester,), daemon=True).start()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        address = "127.0.0.1"
        if host is not None:
            host.enter(rank)
            address = host.store_address
        _join(
            distributed.TCPStore(
                address, port, world_size, is_master=rank == 0, timeout=GROUP_TIMEOUT
            ),
            rank,
            world_size,
        )
        answer = function(*arguments)
        distributed.barrier()
        # By value: multiprocessing would send tensors as file descriptors, of which there are few.
        results.put((rank, pickle.dumps(answer), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _end_with(tester: int) -> None:
    """End this rank when the test process is gone: a killed one cannot clean up."""
    while Path(f"/proc/{tester}").exists():
        time.sleep(1.0)
    os._exit(1)


def restart_job() -> None:
    """End the job and begin it anew in the same processes. Collective.

    Every gloo group keeps threads and sockets: a test that makes the groups of many layouts would
    grind to a halt without this.
    """
    from megatron.core import parallel_state
    from torch import distributed

    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    distributed.barrier()
    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()
    _join(_JOBS.store, rank, world_size)


class _JOBS:
    """The rank's store and how many jobs it has seen: keys of one job must not meet the next."""

    store: Any = None
    count = 0


def _join(store: Any, rank: int, world_size: int) -> None:
    from torch import distributed

    _JOBS.store = store
    _JOBS.count += 1
    distributed.init_process_group(
        "gloo",
        store=distributed.PrefixStore(f"job {_JOBS.count}", store),
        rank=rank,
        world_size=world_size,
        timeout=GROUP_TIMEOUT,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
