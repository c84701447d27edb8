"""How long runs take at a given throughput. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_attnres.errors import InputError

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Throughput:
    """What runs at the same time reach.

    Attributes:
        tflops: 10^12 model FLOPs a second of one run, all its ranks together.
        jobs: runs at a time.

    Raises:
        InputError: no number above 0.
    """

    tflops: float
    jobs: int = 1

    def __post_init__(self) -> None:
        if not (self.tflops > 0 and math.isfinite(self.tflops)):
            raise InputError(f"--tflops {self.tflops}: must be above 0")

    def hours(self, flops: int) -> float:
        """Of one run."""
        return flops / (self.tflops * 1e12) / SECONDS_PER_HOUR

    def hours_in_total(self, flops: Sequence[int]) -> float:
        """Of several runs: their sum over the jobs, but no less than the longest run takes."""
        return max(self.hours(sum(flops)) / self.jobs, *map(self.hours, flops))
