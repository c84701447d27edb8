"""Whether runs of one fit were measured alike. Pure."""

from collections.abc import Sequence
from typing import Any

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.planned_run import PlannedRun

# Flags of pretrain_attnres.py that decide what a loss means.
SAME_FLAGS = (
    "data-path",
    "split",
    "tokenizer-type",
    "tokenizer-model",
    "vocab-size",
    "seq-length",
    "precision",
)
NOT_GIVEN = "not given"
VALIDATED = "--eval-iters x --global-batch-size"


def check_comparable(names: Sequence[str], runs: Sequence[PlannedRun]) -> None:
    """Compare every run with the first.

    Args:
        names: of the runs, for the error.
        runs: their plans.

    Raises:
        InputError: two runs that differ in a flag that decides what a loss means.
    """
    for name, run in zip(names, runs, strict=True):
        for flag in SAME_FLAGS:
            _check(f"--{flag}", (names[0], _value(runs[0], flag)), (name, _value(run, flag)))
        # Sizes may have batches of their own: then the sequences validated on are to be the same.
        _check(VALIDATED, (names[0], _validated(runs[0])), (name, _validated(run)))


def _check(flag: str, first: tuple[str, Any], second: tuple[str, Any]) -> None:
    if first[1] != second[1]:
        raise InputError(
            f"{first[0]} and {second[0]}: {flag} is {first[1]} and {second[1]}, so their losses "
            "cannot be compared; leave one kind out with --exclude"
        )


def _value(run: PlannedRun, flag: str) -> Any:
    value = run.flags.get(flag, NOT_GIVEN)
    # A path alone and a list of it are the same data.
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _validated(run: PlannedRun) -> Any:
    iterations, batch = (_value(run, name) for name in ("eval-iters", "global-batch-size"))
    if isinstance(iterations, int) and isinstance(batch, int):
        return iterations * batch
    return f"{iterations} x {batch}"
