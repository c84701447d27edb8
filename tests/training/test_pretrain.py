"""The whole command on four real ranks: what it writes, resuming, torchrun."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from megatron_attnres.pipeline.plan import PipelinePlan, total_entries
from tests.training.command import (
    MEASURED_FIELDS,
    as_arguments,
    make_corpus,
    right_flags,
    run,
)

ITERATIONS = 6
BATCH, SEQ_LENGTH, HIDDEN = 8, 16, 16
METRICS = {
    *(MEASURED_FIELDS - {"save_pause_seconds"}),
    "iteration",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "p2p_bytes_forward",
    "p2p_bytes_backward",
}
SUMMARY = {
    "validation_loss",
    "unigram_entropy",
    "layout",
    "tokens_per_second",
    "p2p_bytes_per_step",
    "optimizer_state_fraction_per_rank",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pretrain")


@pytest.fixture(scope="module")
def flags(folder):
    """Six iterations on P = 2, V = 2, DP = 2, saved and validated after three."""
    return right_flags(make_corpus(folder, vocab_size=60)) | {
        "nproc-per-node": 4,
        "pipeline-model-parallel-size": 2,
        "virtual-pipeline-model-parallel-size": 2,
        "attn-res-block-size": 3,
        "micro-batch-size": 2,
        "global-batch-size": BATCH,
        "train-iters": ITERATIONS,
        "lr": 1e-2,
        "lr-warmup-iters": 2,
        "split": "80,20,0",
        "eval-interval": 3,
        "eval-iters": 2,
        "data-cache-path": folder / "cache",
    }


@pytest.fixture(scope="module")
def whole_run(folder, flags):
    """The folder of an uninterrupted run."""
    out = folder / "whole"
    answer = run(
        as_arguments(
            flags
            | {
                "metrics-file": out / "metrics.jsonl",
                "summary-file": out / "summary.json",
                "tensorboard-dir": out / "events",
                "save": out / "checkpoints",
                "save-interval": 3,
            }
        )
    )
    assert answer.status == 0, answer.stderr
    assert "validation loss" in answer.stdout
    assert f"{ITERATIONS}/{ITERATIONS}" in answer.stderr, "one progress bar, to the end"
    assert "Warning" not in answer.stderr
    return out


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(line: dict) -> dict:
    return {name: value for name, value in line.items() if name not in MEASURED_FIELDS}


def test_metrics_hold_every_iteration(whole_run):
    lines = metrics_of(whole_run)
    assert [line["iteration"] for line in lines] == list(range(1, ITERATIONS + 1))
    assert all(line.keys() >= METRICS for line in lines)
    assert [line["tokens"] for line in lines] == [
        BATCH * SEQ_LENGTH * (index + 1) for index in range(ITERATIONS)
    ]
    assert [line["iteration"] for line in lines if "validation_loss" in line] == [3, 6]
    assert lines[0]["learning_rate"] < lines[2]["learning_rate"]


def test_metrics_hold_the_bytes_of_the_plan(whole_run):
    entries = total_entries(PipelinePlan((1,) * 4, 2, 3).hops)
    planned = entries * BATCH * SEQ_LENGTH * HIDDEN * 4
    for line in metrics_of(whole_run):
        assert line["p2p_bytes_forward"] == line["p2p_bytes_backward"] == planned


def test_the_run_leaves_summary_curve_events_and_checkpoints(whole_run):
    summary = json.loads((whole_run / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    assert summary["validation_loss"] == metrics_of(whole_run)[-1]["validation_loss"]
    assert summary["optimizer_state_fraction_per_rank"] == pytest.approx(0.5, abs=0.02)
    # Random ids: frequencies are all that can be known of them.
    assert 3.5 < summary["unigram_entropy"] < 4.5
    assert (whole_run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((whole_run / "events").glob("events.out.tfevents.*"))
    checkpoints = sorted(path.name for path in (whole_run / "checkpoints").iterdir())
    assert checkpoints == ["iter_0000003", "iter_0000006", "latest"]


def test_a_resumed_run_goes_on_to_the_last_bit(folder, flags, whole_run):
    out = folder / "resumed"
    shutil.copytree(whole_run / "checkpoints", out / "checkpoints")
    (out / "checkpoints" / "latest").write_text("iter_0000003\n")
    # What the interrupted run wrote after its last save is done again.
    shutil.copy(whole_run / "metrics.jsonl", out / "metrics.jsonl")
    answer = run(
        as_arguments(flags | {"metrics-file": out / "metrics.jsonl", "load": out / "checkpoints"})
    )
    assert answer.status == 0, answer.stderr
    resumed, whole = metrics_of(out), metrics_of(whole_run)
    assert [without_times(line) for line in resumed] == [without_times(line) for line in whole]
    assert resumed[:3] == whole[:3]
    assert resumed[3:] != whole[3:], "these were measured again"


def test_torchrun_gives_the_same_run(folder, flags, whole_run):
    out = folder / "torchrun"
    arguments = as_arguments(
        flags
        | {
            "nproc-per-node": None,
            "metrics-file": out / "metrics.jsonl",
            "train-iters": 2,
            "lr-decay-iters": ITERATIONS,
            "eval-interval": None,
        }
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    answer = run(arguments, command=[*launcher, "pretrain_attnres.py"])
    assert answer.status == 0, answer.stderr
    found = [without_times(line) for line in metrics_of(out)]
    assert found == [without_times(line) for line in metrics_of(whole_run)[:2]]
