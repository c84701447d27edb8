"""Updates that are skipped in real runs: where the bad value was, and that training goes on."""

import json
import math
import os
import sys
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from torch import distributed

from megatron_attnres.errors import TrainingGaveUp
from megatron_attnres.optimizer.main_gradients import main_gradient
from megatron_attnres.optimizer.training_optimizer import TrainingOptimizer
from megatron_attnres.pipeline.step import PipelineStep
from megatron_attnres.training import pretrain
from megatron_attnres.training.configuration import read_configuration
from megatron_attnres.training.signals import SignalNote
from megatron_attnres.training.watching.events import read_events
from megatron_attnres.training.watching.rank_record import host_name
from tests.distributed import restart_job, run_ranks
from tests.training.command import ROOT, Flags, as_arguments, make_corpus, right_flags, run
from tests.training.planting import parameters_of, planting

ITERATIONS, BAD = 6, 3
# Rank 3 is the last stage's second replica; it runs layers 1 and 3.
BAD_RANK, NAME = 3, "layers.3.mlp.linear_fc1.weight"


class Trained(NamedTuple):
    """What one rank saw of a run.

    Attributes:
        states: digests of weights and optimizer state before every iteration's update.
        ending: exit status, or why the run gave up.
    """

    states: list[str]
    ending: int | str


def digest(step: PipelineStep, optimizer: TrainingOptimizer) -> str:
    """Of all that an update changes on this rank."""
    sums = sha256(str(optimizer.steps).encode())
    tensors = list(parameters_of(step).values())
    tensors += [one for part in optimizer.state_slices() for one in part.tensors.values()]
    for tensor in tensors:
        sums.update(tensor.detach().float().numpy().tobytes())
    return sums.hexdigest()


def train(flags: Flags, weight: str | None) -> Trained:
    """A run with a NaN on one rank: in a gradient once, or from then on in a weight."""
    config, tokenizer = read_configuration(as_arguments(flags))
    states, optimizers = [], []
    build_optimizer = pretrain.build_optimizer

    def build(*arguments):
        optimizers.append(build_optimizer(*arguments))
        return optimizers[0]

    def before(step: PipelineStep, iteration: int) -> None:
        if weight is not None and (iteration, distributed.get_rank()) == (BAD, BAD_RANK):
            parameters_of(step)[weight].data.view(-1)[5] = math.nan

    def after(step: PipelineStep, iteration: int) -> None:
        states.append(digest(step, optimizers[0]))
        if weight is None and (iteration, distributed.get_rank()) == (BAD, BAD_RANK):
            main_gradient(parameters_of(step)[NAME]).view(-1)[5] = math.nan

    # The job is there already.
    pretrain.initialize_distributed = lambda timeout, backend: None
    pretrain.leave_job = restart_job
    pretrain.build_optimizer = build
    try:
        with planting(before, after):
            ending = pretrain.pretrain(config, tokenizer, SignalNote(()))
    except TrainingGaveUp as error:
        ending = str(error)
    finally:
        pretrain.build_optimizer = build_optimizer
    return Trained(states, ending)


def train_all(runs: list[tuple[Flags, str | None]]) -> list[Trained]:
    """Runs on every rank."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    return [train(*one) for one in runs]


RUNS = {
    "stage 0": {"zero-stage": 0},
    "stage 1": {"zero-stage": 1},
    "bf16": {"zero-stage": 1, "precision": "bf16"},
    "bad weight": {"max-skipped-steps": 1},
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> Flags:
    folder = tmp_path_factory.mktemp("skipped")
    return right_flags(make_corpus(folder, vocab_size=60)) | {
        "pipeline-model-parallel-size": 2,
        "attn-res-block-size": 3,
        "global-batch-size": 8,
        "train-iters": ITERATIONS,
        "lr": 1e-2,
        "data-cache-path": folder / "cache",
        "heartbeat-seconds": 0.2,
    }


@pytest.fixture(scope="module")
def trained(flags, tmp_path_factory) -> dict[str, tuple[Path, list[Trained]]]:
    """Every run's folder and what its ranks saw."""
    folder = tmp_path_factory.mktemp("runs")
    flags = flags | {"virtual-pipeline-model-parallel-size": 2}
    runs = [
        (flags | changed | {"run-dir": folder / name}, NAME if name == "bad weight" else None)
        for name, changed in RUNS.items()
    ]
    by_run = zip(*run_ranks(train_all, 4, runs), strict=True)
    return {name: (folder / name, list(ranks)) for name, ranks in zip(RUNS, by_run, strict=True)}


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [name for name in RUNS if name != "bad weight"])
def test_a_bad_gradient_skips_one_update_on_all_ranks(trained, name):
    folder, ranks = trained[name]
    for states, ending in ranks:
        assert ending == 0
        assert len(states) == ITERATIONS
        changed = [one != other for one, other in pairwise(states)]
        assert changed == [iteration != BAD for iteration in range(1, ITERATIONS)]
    lines = metrics_of(folder)
    assert [line["update_skipped"] for line in lines] == [
        iteration == BAD for iteration in range(1, ITERATIONS + 1)
    ]
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1, 1, 1]
    assert all(math.isfinite(line["lm_loss"]) for line in lines)
    assert [math.isfinite(line["grad_norm"]) for line in lines] == [
        not line["update_skipped"] for line in lines
    ]
    assert lines[-1]["lm_loss"] < lines[0]["lm_loss"]


@pytest.mark.parametrize("name", [name for name in RUNS if name != "bad weight"])
def test_the_event_says_where_the_bad_gradient_was(trained, name):
    events = read_events(trained[name][0] / "events.jsonl")
    assert [event["kind"] for event in events] == ["start", "skipped", "end"]
    assert events[1]["iteration"] == BAD
    assert events[1]["message"].startswith(
        f"iteration {BAD}: no update, 1 in a row, 1 in all: gradient not finite, first in layer 3, "
        f"{NAME} on rank {BAD_RANK} ({host_name()}); 1 of its "
    )


def test_a_bad_weight_is_named_and_ends_the_run_on_all_ranks_alike(trained):
    folder, ranks = trained["bad weight"]
    reason = (
        "loss not finite, first in the output of layer 3, layers.3.mlp.linear_fc1, micro-batch 0, "
        f"on rank {BAD_RANK} ({host_name()}); its weight {NAME} is not finite"
    )
    verdict = f"--max-skipped-steps 1: 2 updates in a row were skipped; last: {reason}"
    assert [one.ending for one in ranks] == [verdict] * 4
    *_, first, second, last = read_events(folder / "events.jsonl")
    assert (first["kind"], first["iteration"]) == ("skipped", BAD)
    assert second["message"].endswith(f"2 in a row, 2 in all: {reason}")
    assert (last["kind"], last["message"]) == ("gave up", verdict)
    assert [line["iteration"] for line in metrics_of(folder)] == [1, 2, 3, 4]


COMMAND = """
import os, sys
import pretrain_attnres
if "RANK" not in os.environ:
    sys.exit(pretrain_attnres.main(sys.argv))
from megatron_attnres.training.quiet import ignore_known_warnings
ignore_known_warnings()
from megatron_attnres.parallel.cpu import import_megatron_core
import_megatron_core()
from megatron_attnres.optimizer.main_gradients import main_gradient
from tests.training.planting import parameters_of, planting

def plant(step, iteration):
    if os.environ["RANK"] == "0":
        main_gradient(parameters_of(step)["layers.1.mlp_norm.weight"])[0] = float("inf")

with planting(after=plant):
    sys.exit(pretrain_attnres.main(sys.argv))
"""


def test_a_run_that_never_updates_gives_up_with_one_line(flags, tmp_path):
    """The command itself; its rank 0 has a bad gradient in every iteration."""
    command = tmp_path / "command.py"
    command.write_text(COMMAND)
    folder = tmp_path / "run"
    arguments = as_arguments(
        flags | {"run-dir": folder, "nproc-per-node": 2, "max-skipped-steps": 2}
    )
    answer = run(arguments, command=[sys.executable, str(command)], PYTHONPATH=str(ROOT))
    assert answer.status == 3, answer
    lines = [line for line in answer.stderr.splitlines() if line.startswith(str(command))]
    reason = "gradient not finite, first in layer 1, layers.1.mlp_norm.weight on rank 0"
    assert len(lines) == 1
    assert lines[0].startswith(
        f"{command}: --max-skipped-steps 2: 3 updates in a row were skipped; last: {reason}"
    )
    assert "Traceback" not in answer.stderr
    assert [event["kind"] for event in read_events(folder / "events.jsonl")] == [
        "start",
        *["skipped"] * 3,
        "gave up",
    ]
    assert [line["skipped_steps"] for line in metrics_of(folder)] == [1, 2, 3]
    assert not list((folder / "failures").iterdir()), "no rank has failed"
