"""What a scaling law is fitted to: losses of trained runs, a size's seeds together. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.planning.budgets import FLOPS_PER_PFLOPS_DAY

# Compute of one study beyond this factor is a mix of units, which lie 8.6e19 apart.
WIDEST_SPAN = 1e9
# Budgets of one study lie further apart.
SAME_COMPUTE = 1.001
# Below it a curve has no slope to speak of: the sizes of a study at fixed compute.
NARROWEST_SPAN = 1.2
# What losses in nats per token can be; beyond, powers of them leave a float's range.
SMALLEST_LOSS, LARGEST_LOSS = 1e-6, 1e6


@dataclass(frozen=True)
class Point:
    """One trained run.

    Attributes:
        curve: what is compared: ``baseline``, ``block4``, ``full``.
        size: its name.
        seed: None if unknown.
        flops: of the whole training.
        loss: on the validation split, nats per token.
        run: where it comes from: a run's folder, or a line of a file.
    """

    curve: str
    size: str
    seed: int | None
    flops: float
    loss: float
    run: str


@dataclass(frozen=True)
class SizeMean:
    """All seeds of one size and compute. They tell of one size, and count once in a fit.

    Attributes:
        size: its name.
        compute: PFLOP/s-days.
        loss: geometric mean, as fits are of log L; nats per token.
        runs: how many.
    """

    size: str
    compute: float
    loss: float
    runs: int


@dataclass(frozen=True)
class Curve:
    """The runs of one curve.

    Attributes:
        name: of the curve.
        points: all runs, by compute.
        means: what is fitted, by compute.
    """

    name: str
    points: tuple[Point, ...]
    means: tuple[SizeMean, ...]

    @property
    def smallest(self) -> float:
        """The least compute measured, PFLOP/s-days."""
        return self.means[0].compute

    @property
    def largest(self) -> float:
        """The most compute measured, PFLOP/s-days."""
        return self.means[-1].compute

    @property
    def size_count(self) -> int:
        """Different sizes."""
        return len({mean.size for mean in self.means})

    @property
    def seed_spread(self) -> float | None:
        """Standard deviation of log L between seeds of one size; None where no size has two."""
        groups = [list(group) for _, group in groupby(self.points, key=_size_and_compute)]
        squares, degrees = 0.0, 0
        for group in groups:
            logs = [math.log(point.loss) for point in group]
            mean = sum(logs) / len(logs)
            squares += sum((value - mean) ** 2 for value in logs)
            degrees += len(logs) - 1
        return math.sqrt(squares / degrees) if degrees else None


def curves_of(points: Sequence[Point]) -> list[Curve]:
    """The curves, in the order in which they first occur.

    Raises:
        InputError: no points, figures that are not finite and above 0, the same run twice, compute
            in mixed units, a curve of a single size.
    """
    if not points:
        raise InputError("no runs: nothing is left to fit; give runs of at least two sizes")
    for point in points:
        _check_figures(point)
    _check_duplicates(points)
    _check_span(points)
    names = dict.fromkeys(point.curve for point in points)
    return [_curve(name, [point for point in points if point.curve == name]) for name in names]


def _check_figures(point: Point) -> None:
    for name, value in (("loss", point.loss), ("compute", point.flops)):
        if not (math.isfinite(value) and value > 0):
            raise InputError(
                f"{point.run}: its {name} is {value:g}; give finite figures above 0, or leave the "
                "run out with --exclude"
            )
    if not SMALLEST_LOSS <= point.loss <= LARGEST_LOSS:
        raise InputError(
            f"{point.run}: its loss is {point.loss:g}, which is none in nats per token; leave the "
            "run out with --exclude"
        )


def _check_duplicates(points: Sequence[Point]) -> None:
    def key(point: Point) -> tuple[str, str, bool, int]:
        return point.curve, point.size, point.seed is None, point.seed or 0

    for first, second in pairwise(sorted(points, key=lambda point: (*key(point), point.flops))):
        # Nearly the same compute is the same, rounded in one of two files.
        if key(first) == key(second) and second.flops <= SAME_COMPUTE * first.flops:
            seed = "no seed" if first.seed is None else f"seed {first.seed}"
            raise InputError(
                f"{first.run} and {second.run}: both are curve {first.curve}, size {first.size}, "
                f"{seed}, {first.flops:g} FLOPs; give each seed a number, or leave one out with "
                "--exclude"
            )


def _check_span(points: Sequence[Point]) -> None:
    least = min(points, key=lambda point: point.flops)
    most = max(points, key=lambda point: point.flops)
    if most.flops > WIDEST_SPAN * least.flops:
        raise InputError(
            f"{least.run} and {most.run}: {least.flops:.3g} and {most.flops:.3g} FLOPs, a factor "
            f"of {most.flops / least.flops:.1e}, look like mixed units; give one unit for all"
        )


def _curve(name: str, points: Sequence[Point]) -> Curve:
    ordered = sorted(points, key=_size_and_compute)
    means = tuple(_mean(list(group)) for _, group in groupby(ordered, key=_size_and_compute))
    if len({mean.size for mean in means}) < 2:
        raise InputError(
            f"{ordered[0].run}: curve {name} has the single size {means[0].size}, which has no "
            "slope; give runs of more sizes, or leave the curve out with --exclude"
        )
    if means[-1].compute < NARROWEST_SPAN * means[0].compute:
        raise InputError(
            f"{ordered[0].run}: all sizes of curve {name} have about {ordered[0].flops:.3g} FLOPs, "
            f"too near each other for a slope; give runs whose compute differs by a factor of "
            f"{NARROWEST_SPAN:g} or more"
        )
    return Curve(name, tuple(ordered), means)


def _size_and_compute(point: Point) -> tuple[float, str]:
    return point.flops, point.size


def _mean(points: Sequence[Point]) -> SizeMean:
    loss = math.exp(sum(math.log(point.loss) for point in points) / len(points))
    compute = points[0].flops / FLOPS_PER_PFLOPS_DAY
    return SizeMean(points[0].size, compute, loss, len(points))
