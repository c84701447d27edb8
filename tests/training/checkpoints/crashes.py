"""Runs that are stopped and killed, and what they must end with."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.training.command import (
    HIDDEN_VARIABLES,
    MEASURED_FIELDS,
    ROOT,
    Flags,
    as_arguments,
    make_corpus,
    right_flags,
    run,
)

ITERATIONS, INTERVAL = 24, 4


def resumable_flags(folder: Path) -> Flags:
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


def whole_run(folder: Path, flags: Flags) -> tuple[Path, list[dict]]:
    """The folder of an uninterrupted run and its metrics."""
    out = folder / "whole"
    answer = run(
        as_arguments(flags | {"metrics-file": out / "metrics.jsonl", "save": out / "saved"})
    )
    assert answer.status == 0, answer.stderr
    return out, lines_of(out / "metrics.jsonl")


def lines_of(path: Path) -> list[dict]:
    return [
        {name: value for name, value in json.loads(line).items() if name not in MEASURED_FIELDS}
        for line in path.read_text().splitlines()
    ]


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
