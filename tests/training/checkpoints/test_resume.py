"""The whole command: it is stopped, killed, started again, and ends as if nothing had happened."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.command import (
    HIDDEN_VARIABLES,
    ROOT,
    as_arguments,
    make_corpus,
    right_flags,
    run,
)

ITERATIONS, INTERVAL = 24, 4
TIMES = {"step_seconds", "tokens_per_second", "peak_memory_bytes", "save_pause_seconds"}


def lines_of(path: Path) -> list[dict]:
    return [
        {name: value for name, value in json.loads(line).items() if name not in TIMES}
        for line in path.read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def flags(folder):
    """Blended data, dropout, four ranks; saved every four iterations."""
    for name in ("a", "b"):
        (folder / name).mkdir()
    corpora = [make_corpus(folder / name, vocab_size=60) for name in ("a", "b")]
    return right_flags(corpora[0]) | {
        "data-path": ["0.3", corpora[0], "0.7", corpora[1]],
        "hidden-dropout": 0.1,
        "nproc-per-node": 4,
        "pipeline-model-parallel-size": 2,
        "virtual-pipeline-model-parallel-size": 2,
        "attn-res-block-size": 3,
        "micro-batch-size": 2,
        "global-batch-size": 8,
        "train-iters": ITERATIONS,
        "lr": 1e-2,
        "data-cache-path": folder / "cache",
        "save-interval": INTERVAL,
    }


@pytest.fixture(scope="module")
def whole(folder, flags):
    """The folder of an uninterrupted run and its metrics."""
    out = folder / "whole"
    answer = run(
        as_arguments(flags | {"metrics-file": out / "metrics.jsonl", "save": out / "saved"})
    )
    assert answer.status == 0, answer.stderr
    return out, lines_of(out / "metrics.jsonl")


def test_twenty_steps_after_a_resume_are_those_of_the_whole_run_to_the_last_bit(
    folder, flags, whole
):
    out = folder / "resumed"
    shutil.copytree(whole[0] / "saved", out / "saved")
    start = out / "saved" / f"iter_{INTERVAL:07d}"
    flags = flags | {"load": start, "metrics-file": out / "metrics.jsonl", "save-interval": None}
    answer = run(as_arguments(flags))
    assert answer.status == 0, answer.stderr
    found = lines_of(out / "metrics.jsonl")
    assert [line["iteration"] for line in found] == list(range(INTERVAL + 1, ITERATIONS + 1))
    assert found == whole[1][INTERVAL:]
    without = run(as_arguments(flags | {"hidden-dropout": 0.0, "train-iters": INTERVAL + 1}))
    assert without.status == 0, without.stderr
    assert lines_of(out / "metrics.jsonl")[0]["lm_loss"] != found[0]["lm_loss"], "dropout is on"


def test_pauses_are_measured_and_old_checkpoints_go(folder, flags, whole):
    out = folder / "rotated"
    lines = (whole[0] / "metrics.jsonl").read_text().splitlines()
    paused = [one["iteration"] for one in map(json.loads, lines) if "save_pause_seconds" in one]
    assert paused == list(range(INTERVAL, ITERATIONS + 1, INTERVAL))
    flags = flags | {"save": out, "keep-last": 2, "keep-every": 8, "async-save": None}
    answer = run([*as_arguments(flags), "--no-async-save"])
    assert answer.status == 0, answer.stderr
    names = sorted(path.name for path in out.iterdir())
    assert names == ["iter_0000008", "iter_0000016", "iter_0000020", "iter_0000024", "latest"]


def start(flags) -> subprocess.Popen:
    environment = {name: v for name, v in os.environ.items() if name not in HIDDEN_VARIABLES}
    return subprocess.Popen(
        [sys.executable, "pretrain_attnres.py", *as_arguments(flags)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_lines(path: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{path} has not got {count} lines"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_run_with_a_checkpoint(number, folder, flags, whole):
    out = folder / number.name
    flags = flags | {
        "save": out / "saved",
        "metrics-file": out / "metrics.jsonl",
        "save-interval": None,
        "save-on-signal": True,
        "load": "auto",
    }
    process = start(flags)
    wait_for_lines(out / "metrics.jsonl", 5, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    done = len(lines_of(out / "metrics.jsonl"))
    assert 5 <= done < ITERATIONS
    assert (out / "saved" / "latest").read_text() == f"iter_{done:07d}\n"
    answer = run(as_arguments(flags))
    assert answer.status == 0, answer.stderr
    assert lines_of(out / "metrics.jsonl") == whole[1]


def test_a_run_ends_when_its_time_is_over(folder, flags):
    out = folder / "short"
    flags = flags | {"save": out, "exit-duration-minutes": 1e-4, "save-interval": None}
    answer = run(as_arguments(flags))
    assert answer.status == 0, answer.stderr
    assert (out / "latest").read_text() == "iter_0000001\n"


def test_a_rank_killed_at_any_moment_costs_an_interval_at_most(folder, flags, whole):
    """Saves every three iterations; auto goes on each time; the end is the same to the last bit."""
    crash_rounds(folder / "crashes", flags, whole[1], rounds=3, seed=1)


def crash_rounds(out: Path, flags, expected: list[dict], rounds: int, seed: int) -> list[str]:
    """Kill a random rank at random moments, ``rounds`` times in a row, then let the run end."""
    chance = random.Random(seed)
    flags = flags | {
        "save": out / "saved",
        "metrics-file": out / "metrics.jsonl",
        "save-interval": 3,
        "load": "auto",
    }
    told = []
    for _ in range(rounds):
        process = start(flags)
        before = len(lines_or_none(out / "metrics.jsonl"))
        goal = min(before + chance.randint(1, 5), len(expected) - 1)
        wait_for_lines(out / "metrics.jsonl", goal, process)
        time.sleep(chance.random() * 0.2)
        ranks = children_of(process.pid)
        victim = chance.choice(ranks)
        writing = sorted(path.name for path in (out / "saved").glob("*.writing"))
        os.kill(victim, signal.SIGKILL)
        process.communicate(timeout=120)
        assert process.returncode != 0
        done = len(lines_or_none(out / "metrics.jsonl"))
        told.append(f"rank {ranks.index(victim)} after iteration {done}, writing {writing}")
    answer = run(as_arguments(flags))
    assert answer.status == 0, (answer.stderr, told)
    assert lines_of(out / "metrics.jsonl") == expected, told
    return told


def lines_or_none(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
