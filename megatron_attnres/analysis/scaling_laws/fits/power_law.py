"""A power law of the loss over compute, as plain data. No torch."""

import math
from dataclasses import dataclass
from enum import StrEnum


class Form(StrEnum):
    """What is fitted."""

    POWER = "power"  # L = A C^-alpha, as the paper's figure 4
    OFFSET = "offset"  # L = E + A C^-alpha

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the fields of ``PowerLaw`` that are fitted."""
        both = ("coefficient", "exponent")
        return both if self is Form.POWER else (*both, "offset")


# Of what a float holds.
LARGEST_LOG = math.log(1e300)


@dataclass(frozen=True)
class PowerLaw:
    """L = E + A C^-alpha, with C in PFLOP/s-days and L in nats per token.

    Attributes:
        coefficient: A, the loss above the offset at C = 1.
        exponent: alpha, above 0 where the loss falls with compute.
        offset: E, the loss that no compute takes away.
    """

    coefficient: float
    exponent: float
    offset: float = 0.0

    def loss(self, compute: float) -> float:
        """At ``compute`` PFLOP/s-days."""
        logarithm = math.log(self.coefficient) - self.exponent * math.log(compute)
        return self.offset + (math.exp(logarithm) if logarithm < LARGEST_LOG else math.inf)

    def compute(self, loss: float) -> float:
        """PFLOP/s-days that take to a loss; infinite if none do."""
        if loss <= self.offset:
            return math.inf
        # By logarithms: a small exponent takes a power beyond a float's range.
        logarithm = (math.log(self.coefficient) - math.log(loss - self.offset)) / self.exponent
        return math.exp(logarithm) if logarithm < LARGEST_LOG else math.inf
