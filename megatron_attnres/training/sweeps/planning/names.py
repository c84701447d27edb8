"""Names of sizes and runs: folders, and words of a Slurm lines file. Pure."""

import re

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.planning.budgets import Budget
from megatron_attnres.training.sweeps.planning.curves import Curve

ALLOWED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")
UNITS_IN_NAMES = {
    "tokens": "tokens",
    "tokens-per-parameter": "tokens-per-parameter",
    "compute": "FLOPs",
}


def check_size_name(name: str, place: str) -> None:
    """Refuse what makes no folder or no single word.

    Raises:
        InputError: see above.
    """
    if not ALLOWED.fullmatch(name):
        raise InputError(
            f"{place}: {name!r} cannot name a folder; give letters, digits and . _ + = -, the "
            "first a letter or digit"
        )


def run_name(
    size: str, curve: Curve, budget: Budget | None, learning_rate: float, seed: int
) -> str:
    """A run's name.

    Args:
        size: its name.
        curve: what is compared.
        budget: where the size has several; else None.
        learning_rate: the highest.
        seed: of weights and data order.
    """
    spent = [] if budget is None else [f"{budget.amount:g}{UNITS_IN_NAMES[budget.kind]}"]
    return "-".join([size, curve.name, *spent, f"lr{learning_rate:g}", f"seed{seed}"])
