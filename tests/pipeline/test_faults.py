"""Ranks that disagree, die or hang end the job with a message, and no rank is left waiting."""

import os
import re
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch

from megatron_attnres.errors import InputError
from megatron_attnres.parallel.agreement import check_same_on_all_ranks
from megatron_attnres.parallel.groups import initialize_groups
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.configuration import read_configuration
from megatron_attnres.training.forward_step import forward_step
from megatron_attnres.training.pretrain import plan_description
from tests.distributed import RankError, run_ranks
from tests.layouts import Case, build, microbatches, run_step, small_model
from tests.training.command import HIDDEN_VARIABLES, ROOT, as_arguments, make_corpus, right_flags

PIPELINE = {"pipeline-model-parallel-size": 2, "attn-res-block-size": 4}
# What one rank has instead, and what the refusal says of the field that differs.
DIFFERENT = {
    "block size": ({"attn-res-block-size": 3}, "block_size 4", "3"),
    "layer split": (
        {"pipeline-layers-per-chunk": [3, 1]},
        "layers_per_chunk (2, 2)",
        "(3, 1)",
    ),
    "policy": ({"attn-res-pipeline": "naive"}, "policy cached", "naive"),
    "early relay": ({"no-attn-res-early-relay": True}, "early_relay True", "False"),
    "mode": ({"attn-res-mode": "full", "attn-res-block-size": None}, "block_size 4", "1"),
    "model depth": ({"num-layers": 6}, "layers_per_chunk (2, 2)", "(3, 3)"),
    "iterations": ({"train-iters": 2}, "train_iters 1", "2"),
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return right_flags(make_corpus(tmp_path_factory.mktemp("corpus"), vocab_size=60)) | PIPELINE


def refusals(flags_of_rank: list[dict]) -> list[str]:
    """Runs on every rank: what is said of each pair of flags in turn."""
    from torch import distributed

    rank = distributed.get_rank()
    said = []
    for others in flags_of_rank:
        mine = flags_of_rank[0] if rank == 0 else others
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
        config, _ = read_configuration(as_arguments(mine))
        try:
            check_same_on_all_ranks(plan_description(config))
            said.append("")
        except InputError as error:
            said.append(str(error))
    return said


def test_ranks_with_different_plans_are_refused_and_told_the_field(flags):
    choices = [flags | different for different, _, _ in DIFFERENT.values()]
    rank_0, rank_1 = run_ranks(refusals, 2, [flags, *choices])
    assert rank_0 == rank_1, "all ranks know why"
    assert rank_0[0] == ""
    for line, (_, first, second) in zip(rank_0[1:], DIFFERENT.values(), strict=True):
        field = first.split()[0]
        assert re.match(rf"rank 0 has {re.escape(first)}, rank 1 has {re.escape(second)};", line), (
            field,
            line,
        )
        assert "\n" not in line


def test_a_job_of_ranks_that_disagree_ends_at_once(flags):
    """The command itself, started rank by rank as a cluster's launcher does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inherited = {name: v for name, v in os.environ.items() if name not in HIDDEN_VARIABLES}
    choices = [flags, flags | {"pipeline-layers-per-chunk": [3, 1]}]
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "pretrain_attnres.py",
                *as_arguments(choice | {"distributed-timeout-minutes": 0.5}),
            ],
            cwd=ROOT,
            env=inherited
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, choice in enumerate(choices)
    ]
    try:
        (_, said), (_, silent) = (rank.communicate(timeout=90) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [2, 2], said + silent
    assert said.splitlines() == [
        "pretrain_attnres.py: rank 0 has layers_per_chunk (2, 2), rank 1 has (3, 1); start all "
        "ranks with the same flags"
    ]
    assert silent == "", "printed once"


def step_with_a_fault(case: Case, faulty_rank: int, fault: str, timeout: float) -> None:
    """Runs on every rank: a whole step, then one that a rank leaves in its third forward."""
    groups, step = build(
        case, torch.float32, initialize_groups(case.layout, timedelta(seconds=timeout))
    )
    run_step(case, groups, step)
    calls = 0

    def faulty_step(iterator, chunk):
        nonlocal calls
        calls += 1
        if groups.pipeline_rank == faulty_rank and calls == 3:
            if fault == "dies":
                os._exit(9)
            time.sleep(600)
        return forward_step(iterator, chunk)

    batches = microbatches(case, groups.data_rank)
    step.run(faulty_step, [iter(batches) for _ in step.chunks], case.num_microbatches)


def lost(rank: int) -> str:
    return (
        r"PipelineTransferError: (forward|backward) hop \d-\d of micro-batch \d, "
        rf"(critical|relay) lane: (receive from|send to) rank {rank} failed: \S+"
    )


CASES = {
    "1F1B": Case(small_model(4, block_size=3), ParallelLayout(1, 2, 1), 4),
    "interleaved": Case(small_model(4, block_size=3), ParallelLayout(1, 2, 2), 4),
    "no overlap": Case(small_model(4, block_size=3), ParallelLayout(1, 2, 2), 4, overlap=False),
    "relays": Case(small_model(6, block_size=2), ParallelLayout(1, 3, 2), 6),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_peer_that_dies_ends_the_job_with_the_message_that_was_lost(case, rank):
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(step_with_a_fault, case.layout.world_size, case, rank, "dies", 60.0, timeout=50)
    assert time.monotonic() - start < 30, "well within the timeout of the groups"
    assert f"rank {rank}: died with exit code 9" in str(caught.value)
    assert re.search(lost(rank), str(caught.value)), caught.value
    assert "did not finish in time" not in str(caught.value)


def test_a_peer_that_hangs_ends_the_job_within_the_timeout():
    case = Case(small_model(6, block_size=2), ParallelLayout(1, 3, 1), 6)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(step_with_a_fault, 3, case, 1, "hangs", 3.0, timeout=50)
    assert time.monotonic() - start < 30
    directions = {match[1] for match in re.finditer(lost(1), str(caught.value))}
    assert directions == {"forward", "backward"}, "both neighbours say what they miss"


def send_to_the_dead() -> None:
    """Runs on two ranks: a validation step, in which rank 0 only sends, to a rank that has died."""
    case = Case(small_model(4, block_size=3), ParallelLayout(1, 2, 1), 4)
    groups, step = build(case, torch.float32)
    if groups.pipeline_rank == 1:
        os._exit(9)
    time.sleep(2)
    batches = microbatches(case, groups.data_rank)
    step.run(forward_step, [iter(batches)], case.num_microbatches, forward_only=True)


def test_a_send_that_cannot_be_posted_names_its_message():
    with pytest.raises(RankError, match=lost(1)):
        run_ranks(send_to_the_dead, 2, timeout=50)
