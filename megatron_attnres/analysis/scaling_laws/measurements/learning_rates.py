"""One learning rate for each curve and size, where several were tried. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_attnres.analysis.scaling_laws.measurements.points import Point
from megatron_attnres.errors import InputError


@dataclass(frozen=True)
class TriedPoint:
    """A point and the highest learning rate of its run."""

    point: Point
    learning_rate: float

    @property
    def group(self) -> tuple[str, str, float]:
        """What one learning rate is chosen for."""
        return self.point.curve, self.point.size, self.point.flops


@dataclass(frozen=True)
class Choice:
    """A learning rate that was taken.

    Attributes:
        curve, size: of the runs.
        learning_rate: the best: of the lowest loss, on average over seeds.
        tried: all, ascending.
    """

    curve: str
    size: str
    learning_rate: float
    tried: tuple[float, ...]

    @property
    def is_at_edge(self) -> bool:
        """Whether a lower or a higher one, not tried, may be better."""
        return self.learning_rate in (self.tried[0], self.tried[-1])


def check_single(tried: Sequence[TriedPoint]) -> None:
    """Refuse several learning rates of one curve and size.

    Raises:
        InputError: see above.
    """
    for group in _groups(tried):
        if len({one.learning_rate for one in group}) > 1:
            first = group[0]
            other = next(one for one in group if one.learning_rate != first.learning_rate)
            raise InputError(
                f"{first.point.run} and {other.point.run}: learning rates "
                f"{first.learning_rate:g} and {other.learning_rate:g} of one curve and size; take "
                "the best with --best-learning-rate, or leave one out with --exclude"
            )


def take_best(
    tried: Sequence[TriedPoint],
) -> tuple[list[TriedPoint], list[TriedPoint], list[Choice]]:
    """What stays, what is left out, and the choices where there was one."""
    kept: list[TriedPoint] = []
    left: list[TriedPoint] = []
    choices = []
    for group in _groups(tried):
        rates = sorted({one.learning_rate for one in group})
        best = min(rates, key=_mean_loss(group))
        kept += [one for one in group if one.learning_rate == best]
        left += [one for one in group if one.learning_rate != best]
        if len(rates) > 1:
            curve, size, _ = group[0].group
            choices.append(Choice(curve, size, best, tuple(rates)))
    return kept, left, choices


def _groups(tried: Sequence[TriedPoint]) -> list[list[TriedPoint]]:
    keys = dict.fromkeys(one.group for one in tried)
    return [[one for one in tried if one.group == key] for key in keys]


def _mean_loss(group: Sequence[TriedPoint]) -> Callable[[float], float]:
    return lambda rate: fmean(one.point.loss for one in group if one.learning_rate == rate)
