"""The launcher of multi-process tests: ranks from a warm fork server, cleaned up whatever happens.

Importing torch, DeepSpeed and Megatron-Core takes seconds per process. The fork server imports
them once; every rank of every test is then forked from it in milliseconds.
"""

import multiprocessing
import queue
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])

GROUP_TIMEOUT = timedelta(seconds=60)


class RankError(AssertionError):
    """A rank raised, died or did not finish; carries the ranks' tracebacks."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 300.0
) -> list[Any]:
    """Call ``function(*arguments)`` on every rank of a new gloo job and return the results.

    Args:
        function: a module-level function; torch.distributed is initialised when it runs and each
            rank computes with one thread.
        world_size: ranks.
        arguments: picklable, the same on every rank.
        timeout: seconds after which the ranks are killed.

    Raises:
        RankError: with the traceback of every rank that failed.
    """
    results: Any = _CONTEXT.Queue()
    port = _free_port()
    processes = [
        _CONTEXT.Process(
            target=_rank_main,
            args=(function, arguments, rank, world_size, port, results),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        return _collect(processes, results, time.monotonic() + timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join(timeout=10)


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
                failures |= dict.fromkeys(missing, "did not finish in time")
            continue
        if failure is None:
            answers[rank] = answer
        else:
            failures[rank] = failure
            # The others may now wait for this rank: give them a moment to say so themselves.
            deadline = min(deadline, time.monotonic() + 5)
    if failures:
        text = "\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures))
        raise RankError(text)
    return [answers[rank] for rank in range(len(processes))]


def _rank_main(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    results: Any,
) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        store = distributed.TCPStore(
            "127.0.0.1", port, world_size, is_master=rank == 0, timeout=GROUP_TIMEOUT
        )
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
        )
        answer = function(*arguments)
        distributed.barrier()
        results.put((rank, answer, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
