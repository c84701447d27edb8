"""How long runs train: budgets of tokens or compute, in whole iterations. Pure, no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_attnres.errors import InputError
from megatron_attnres.model.configuration import AttnResConfig, ModelConfig
from megatron_attnres.model.flops import training_flops
from megatron_attnres.model.parameter_count import parameter_count
from megatron_attnres.training.sweeps.planning.grid_values import positive_number, values

BudgetKind = Literal["tokens", "tokens-per-parameter", "compute"]
BUDGET_KINDS: tuple[BudgetKind, ...] = ("tokens", "tokens-per-parameter", "compute")
UNIT_NAMES: dict[BudgetKind, str] = {
    "tokens": "tokens",
    "tokens-per-parameter": "tokens per parameter",
    "compute": "FLOPs",
}
FLOPS_PER_PFLOPS_DAY = 10**15 * 24 * 60 * 60
FLOPS_PER_UNIT = {"FLOPs": 1, "PFLOP/s-days": FLOPS_PER_PFLOPS_DAY}


@dataclass(frozen=True)
class Budget:
    """What a run may spend.

    Attributes:
        kind: what is counted.
        amount: tokens; tokens for every parameter of the whole model as baseline, so that all modes
            of a size train on the same tokens; or FLOPs as model/flops.py counts.
    """

    kind: BudgetKind
    amount: float


def budgets_of(keys: Mapping[str, Any], place: str) -> tuple[Budget, ...]:
    """The budgets that a grid or a size gives; none if it has no such key.

    Args:
        keys: of the grid or the size.
        place: for the error.

    Raises:
        InputError: two kinds, an empty list, no number above 0, compute without its unit.
    """
    given = [kind for kind in BUDGET_KINDS if kind in keys]
    if len(given) > 1:
        raise InputError(f"{place}: has {' and '.join(given)}; give one of them")
    return tuple(
        Budget(kind, amount)
        for kind in given
        for amount in values(
            keys[kind], f"{place}.{kind}", flops_of if kind == "compute" else positive_number
        )
    )


def flops_of(value: Any, place: str) -> float:
    """Compute with its unit, in FLOPs.

    Raises:
        InputError: no unit, another one, or no number above 0 before it.
    """
    units = " or ".join(f'"3 {unit}"' for unit in FLOPS_PER_UNIT)
    parts = re.fullmatch(r"(\S+)\s+(\S+)", value.strip()) if isinstance(value, str) else None
    if parts is None or parts[2] not in FLOPS_PER_UNIT:
        raise InputError(f"{place}: {value!r} has no unit that is known; give e.g. {units}")
    return positive_number(parts[1], place) * FLOPS_PER_UNIT[parts[2]]


def iterations_of(budget: Budget, model: ModelConfig, global_batch_size: int) -> int:
    """The whole number of iterations nearest to the budget.

    Args:
        budget: of the run.
        model: of the run, with its mode.
        global_batch_size: sequences per iteration.

    Raises:
        InputError: the budget is no whole iteration.
    """
    iterations = _sequences(budget, model) / global_batch_size
    if iterations < 1:
        raise InputError(
            f"a budget of {budget.amount:g} {UNIT_NAMES[budget.kind]} is {iterations:.2g} "
            f"iterations of {global_batch_size} sequences; give more, or a smaller "
            "global-batch-size"
        )
    return round(iterations)


def _sequences(budget: Budget, model: ModelConfig) -> float:
    if budget.kind == "compute":
        return budget.amount / training_flops(model)
    if budget.kind == "tokens":
        return budget.amount / model.seq_length
    baseline = replace(model, attn_res=AttnResConfig("baseline"))
    return budget.amount * parameter_count(baseline).total / model.seq_length
