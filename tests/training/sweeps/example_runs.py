"""Planned runs as tests need them."""

from dataclasses import replace

from megatron_attnres.training.sweeps.planned_run import PlannedRun

ITERATIONS = 10


def planned(name: str, **changes) -> PlannedRun:
    """A run that validates at its end; ``flags`` among the changes are added to its own."""
    run = PlannedRun(
        name=name,
        size="l4h16",
        curve="baseline",
        learning_rate=0.01,
        seed=1,
        parameters=2000,
        non_embedding_parameters=1000,
        tokens=640,
        train_iters=ITERATIONS,
        flops=10**9,
        flags={"lr": 0.01, "train-iters": ITERATIONS, "eval-interval": ITERATIONS},
    )
    flags = {**run.flags, **changes.pop("flags", {})}
    return replace(run, flags=flags, **changes)
