"""Curves with known constants, and sweeps as a launcher leaves them."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_attnres.analysis.scaling_laws.fits.power_law import PowerLaw
from megatron_attnres.analysis.scaling_laws.measurements.points import Point
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.sweeps.planning.budgets import FLOPS_PER_PFLOPS_DAY
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder

PAPER = {"baseline": PowerLaw(1.891, 0.057), "block4": PowerLaw(1.870, 0.058)}
COMPUTES = (0.7, 1.1, 1.8, 3.6, 5.8)
FLAGS = {"data-path": ["text"], "split": "98,2,0", "seq-length": 128, "eval-iters": 20}


def points_of(
    name: str,
    law: PowerLaw,
    computes: Sequence[float] = COMPUTES,
    seeds: int = 1,
    noise: float = 0.0,
    seed: int = 0,
) -> list[Point]:
    """Runs on a law, off it by normal noise of log L."""
    generator = np.random.default_rng((seed, 7))
    return [
        Point(
            name,
            f"s{size}",
            run,
            compute * FLOPS_PER_PFLOPS_DAY,
            law.loss(compute) * math.exp(noise * generator.standard_normal()),
            f"{name}-s{size}-seed{run}",
        )
        for size, compute in enumerate(computes)
        for run in range(1, seeds + 1)
    ]


def plan(size: str = "s0", curve: str = "baseline", rate: float = 0.01, seed: int = 1, **changes):
    """A run of 30 iterations."""
    name = f"{size}-{curve}-lr{rate:g}-seed{seed}"
    run = PlannedRun(name, size, curve, rate, seed, 1000, 800, 30_720, 30, 10**12, FLAGS)
    return replace(run, **changes)


def write_metrics(folder: SweepFolder, run: PlannedRun, loss: float | None, **changes) -> None:
    """The first iterations and the last, which validates unless ``loss`` is None."""
    rates = {1: 0.0, 10: run.learning_rate, run.train_iters: run.learning_rate / 100}
    lines = [
        {"iteration": iteration, "learning_rate": rate, "tokens": iteration * 1024}
        for iteration, rate in rates.items()
    ]
    if loss is not None:
        lines[-1]["validation_loss"] = loss
    lines[-1].update(changes)
    metrics = folder.run(run.name).metrics
    metrics.parent.mkdir(parents=True, exist_ok=True)
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_sweep(path: Path, runs: Sequence[PlannedRun], losses: Sequence[float]) -> SweepFolder:
    """A finished sweep."""
    folder = SweepFolder(path)
    folder.write_plan(runs)
    for run, loss in zip(runs, losses, strict=True):
        write_metrics(folder, run, loss)
    return folder


def laptop_sweep(path: Path) -> SweepFolder:
    """Five sizes of two curves at a laptop's compute, exactly on two laws."""
    laws = {"baseline": PowerLaw(0.9, 0.1), "full": PowerLaw(0.88, 0.1)}
    flops = [8e11, 2e12, 6e12, 1.6e13, 4e13]
    runs = [
        plan(f"l{index}", curve, flops=int(count))
        for curve in laws
        for index, count in enumerate(flops)
    ]
    losses = [laws[run.curve].loss(run.flops / FLOPS_PER_PFLOPS_DAY) for run in runs]
    return write_sweep(path, runs, losses)
