"""Errors whose cause is another rank, as real backends raise them, and a rank's own."""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

from megatron_attnres.pipeline.transfer import PipelineTransferError
from megatron_attnres.training.watching.elsewhere import comes_from_elsewhere
from tests.distributed import run_ranks, start_process

SHORT = timedelta(seconds=0.3)


def calls_on(group: distributed.ProcessGroup | None) -> dict[str, Callable[[], object]]:
    """What waits for rank 1."""
    tensor = torch.zeros(4)
    return {
        "receive": lambda: distributed.recv(tensor, 1, group),
        "posted receive": lambda: distributed.irecv(tensor, 1, group).wait(),
        "sum": lambda: distributed.all_reduce(tensor, group=group),
        "objects": lambda: distributed.all_gather_object([None, None], 1, group),
    }


def verdict_on(call: Callable[[], object]) -> tuple[str, bool]:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}", comes_from_elsewhere(error)
    return "no error", False


def errors_of_a_late_peer() -> list[tuple[str, bool]]:
    """Runs on two ranks: rank 0 waits for the other in vain."""
    found = []
    for name in calls_on(None):
        group = distributed.new_group([0, 1], timeout=SHORT)
        if distributed.get_rank() == 0:
            found.append(verdict_on(calls_on(group)[name]))
        distributed.barrier()
    return found


def lose_a_peer(folder: Path, rank: int) -> None:
    """A process of a job of two: one dies, the other one tries again and again to reach it."""
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    distributed.barrier()
    if rank == 1:
        os._exit(9)
    found = [verdict_on(call) for call in calls_on(None).values()]
    (folder / "found.json").write_text(json.dumps(found))
    os._exit(0)


def errors_of_a_store() -> tuple[str, bool]:
    """Runs on one rank: the job's store has not got what another rank was to put there."""
    store = distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=SHORT)
    return verdict_on(lambda: store.get("of another rank"))


def test_a_late_peer_s_errors_come_from_elsewhere():
    found = run_ranks(errors_of_a_late_peer, 2)[0]
    assert [verdict for _, verdict in found] == [True] * 4, found
    assert all("Timed out" in error for error, _ in found)


def test_a_dead_peer_s_errors_come_from_elsewhere(tmp_path):
    ranks = [start_process(lose_a_peer, tmp_path, rank) for rank in range(2)]
    for rank in ranks:
        rank.join(timeout=30)
    assert [rank.exitcode for rank in ranks] == [0, 9]
    found = json.loads((tmp_path / "found.json").read_text())
    assert [verdict for _, verdict in found] == [True] * 4, found
    assert not any("Timed out" in error for error, _ in found)


def test_a_store_s_errors_come_from_elsewhere():
    [(error, verdict)] = run_ranks(errors_of_a_store, 1)
    assert verdict, error


@pytest.mark.parametrize(
    "error",
    [
        PipelineTransferError("forward hop 0-1: receive from rank 1 failed"),
        ConnectionResetError("reset"),
        BrokenPipeError("broken"),
        distributed.DistBackendError("NCCL error"),
        distributed.DistStoreError("timeout"),
        distributed.DistNetworkError("refused"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_types_that_say_so(error):
    assert comes_from_elsewhere(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("wrong"),
        RuntimeError("shape '[2, 3]' is invalid for input of size 4"),
        RuntimeError("step ended with source 1 of micro-batch 3, brought by chunk 5"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        KeyError("gloo"),
        AssertionError(),
        OSError(28, os.strerror(28)),
        FileNotFoundError("nowhere"),
        TimeoutError("has not got on for 700 s"),
        MemoryError(),
        StopIteration(),
    ],
    ids=lambda error: f"{type(error).__name__} {error}"[:30],
)
def test_a_rank_s_own_errors_do_not(error):
    assert not comes_from_elsewhere(error)


def test_real_errors_of_torch_s_own_do_not():
    def wrong_shapes() -> None:
        torch.zeros(2, 3) @ torch.zeros(2, 3)

    def too_much() -> None:
        torch.empty(2**60)

    for call in (wrong_shapes, too_much):
        error, verdict = verdict_on(call)
        assert error != "no error" and not verdict
