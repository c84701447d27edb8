"""Ranks that compute more slowly than their equals. No torch.

A pipeline is as slow as its slowest rank, and all ranks' step times are alike because they wait
for it. What differs is the time that a rank itself computes: its forward and backward without its
waits. Ranks of one stage do the same work; a rank without equals is compared with its own best.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class StragglerConfig:
    """When to report.

    Attributes:
        interval: iterations per report; 0 for never.
        ratio: of a rank's compute time to the fastest of its stage.
    """

    interval: int
    ratio: float


@dataclass(frozen=True)
class Straggler:
    """A slow rank: seconds that it computes per step, and those of the fastest of its stage."""

    rank: int
    stage: int
    seconds: float
    fastest: float

    @property
    def ratio(self) -> float:
        """How many times slower."""
        return self.seconds / self.fastest


class Stragglers:
    """Collects every rank's compute time and compares their medians every so many iterations.

    Args:
        config: when to report.
        num_stages: P; global ranks are grouped by stage, as Megatron-Core orders them.
    """

    def __init__(self, config: StragglerConfig, num_stages: int) -> None:
        self._config = config
        self._num_stages = num_stages
        self._steps: list[Sequence[float]] = []
        self._fastest = [float("inf")] * num_stages

    def look(self, compute_seconds: Sequence[float]) -> list[Straggler]:
        """Take one iteration's compute time of every rank.

        Returns:
            At the end of an interval the slow ranks, the slowest first; else nothing.
        """
        if not self._config.interval:
            return []
        self._steps.append(compute_seconds)
        if len(self._steps) < self._config.interval:
            return []
        medians = [median(of_rank) for of_rank in zip(*self._steps, strict=True)]
        self._steps = []
        per_stage = len(medians) // self._num_stages
        for rank, seconds in enumerate(medians):
            stage = rank // per_stage
            self._fastest[stage] = min(self._fastest[stage], seconds)
        found = [
            Straggler(rank, rank // per_stage, seconds, self._fastest[rank // per_stage])
            for rank, seconds in enumerate(medians)
        ]
        slow = [one for one in found if one.fastest > 0 and one.ratio > self._config.ratio]
        return sorted(slow, key=lambda one: one.ratio, reverse=True)
