"""Compute advantages between power laws that are given, without points. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_attnres.analysis.scaling_laws.fits.advantage import compute_factor
from megatron_attnres.analysis.scaling_laws.fits.power_law import PowerLaw
from megatron_attnres.errors import InputError

EXAMPLE = "baseline=1.891,0.057"


@dataclass(frozen=True)
class GivenAdvantage:
    """Of a law over the reference.

    Attributes:
        curve, reference: their names.
        compute: PFLOP/s-days.
        loss, reference_loss: there, nats per token.
        factor: compute advantage; infinite where the reference never gets there.
    """

    curve: str
    reference: str
    compute: float
    loss: float
    reference_loss: float
    factor: float


def parse_laws(texts: Sequence[str]) -> dict[str, PowerLaw]:
    """Laws by name, from texts as ``baseline=1.891,0.057``: A, alpha and, if any, E.

    Raises:
        InputError: another text, the same name twice, constants that are no law.
    """
    laws: dict[str, PowerLaw] = {}
    for text in texts:
        name, equals, numbers = text.partition("=")
        try:
            constants = [float(number) for number in numbers.split(",")]
        except ValueError:
            constants = []
        if not (name and equals and len(constants) in (2, 3)):
            raise InputError(f"--constants {text}: give a name, A, alpha and, if any, E: {EXAMPLE}")
        if name in laws:
            raise InputError(f"--constants {text}: {name} is given twice; give each curve once")
        is_law = constants[0] > 0 and constants[1] > 0 and all(one >= 0 for one in constants[2:])
        if not (is_law and all(map(math.isfinite, constants))):
            raise InputError(
                f"--constants {text}: A and alpha above 0 and E of at least 0 are allowed; "
                f"give e.g. {EXAMPLE}"
            )
        laws[name] = PowerLaw(*constants)
    return laws


def given_advantages(
    laws: Mapping[str, PowerLaw], reference: str, compute: float
) -> list[GivenAdvantage]:
    """Every other law over the reference, at ``compute`` PFLOP/s-days.

    Raises:
        InputError: a law whose loss there is no number.
    """
    base = laws[reference]
    for name, law in laws.items():
        if not 0 < law.loss(compute) < math.inf:
            raise InputError(
                f"--constants: {name} has a loss of {law.loss(compute):g} at {compute:g} "
                "PFLOP/s-days; give another --at or other constants"
            )
    return [
        GivenAdvantage(
            name,
            reference,
            compute,
            law.loss(compute),
            base.loss(compute),
            compute_factor(base, law, compute),
        )
        for name, law in laws.items()
        if name != reference
    ]
