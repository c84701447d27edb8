"""From points to fitted curves, how sure they are, and what one has over another. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_attnres.analysis.scaling_laws.fits.advantage import (
    Advantage,
    advantage_of,
    common_range,
    compute_factor,
    spread_over,
)
from megatron_attnres.analysis.scaling_laws.fits.fitting import Fit, fewest_sizes, fit_curve
from megatron_attnres.analysis.scaling_laws.fits.intervals import Interval, constant_intervals
from megatron_attnres.analysis.scaling_laws.fits.power_law import Form
from megatron_attnres.analysis.scaling_laws.measurements.learning_rates import Choice
from megatron_attnres.analysis.scaling_laws.measurements.points import Curve, Point, curves_of
from megatron_attnres.errors import InputError


@dataclass(frozen=True)
class Measurements:
    """What is to be fitted, and what is not.

    Attributes:
        points: of all curves.
        excluded: runs that the user left out.
        worse: runs at another learning rate than the best.
        choices: of learning rates.
    """

    points: tuple[Point, ...]
    excluded: tuple[str, ...] = ()
    worse: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()


@dataclass(frozen=True)
class Question:
    """What is asked of the points.

    Attributes:
        forms: to fit.
        reference: the curve that others are compared with; None: ``baseline``, or the first.
        at: PFLOP/s-days; None: the most that both curves reach.
        resamples: of each interval.
        seed: of the resamples.
    """

    forms: tuple[Form, ...]
    reference: str | None
    at: float | None
    resamples: int
    seed: int


@dataclass(frozen=True)
class SureFit:
    """A fit and the 95 % intervals of its constants, by the names of PowerLaw's fields."""

    fit: Fit
    intervals: dict[str, Interval]


@dataclass(frozen=True)
class RangeAdvantage:
    """Over the range of compute that both curves measure.

    Attributes:
        low, high: of the range, PFLOP/s-days.
        mean: on average.
        least, greatest: factors at single computes in it.
    """

    low: float
    high: float
    mean: Advantage
    least: float
    greatest: float


@dataclass(frozen=True)
class Comparison:
    """A curve over the reference.

    Attributes:
        reference, other: fits of one form.
        compute: PFLOP/s-days of ``at``.
        at: at that compute.
        over_range: None where no range is measured by both.
    """

    reference: Fit
    other: Fit
    compute: float
    at: Advantage
    over_range: RangeAdvantage | None

    @property
    def form(self) -> Form:
        """Of both fits."""
        return self.other.form


@dataclass(frozen=True)
class Study:
    """All results.

    Attributes:
        measurements: what went in.
        curves: of the points, the reference first.
        fits: by form, then by curve.
        comparisons: by form, then by curve.
        skipped: forms and curves with too few points for them.
    """

    measurements: Measurements
    curves: tuple[Curve, ...]
    fits: tuple[SureFit, ...]
    comparisons: tuple[Comparison, ...]
    skipped: tuple[tuple[Form, Curve], ...]


def study_of(measurements: Measurements, question: Question) -> Study:
    """Fit every form to every curve, and compare with the reference.

    With several forms, a form that has too few points of a curve is skipped; a single form is what
    was asked for, and then that is an error.

    Raises:
        InputError: points that cannot be fitted, a reference that is no curve.
    """
    curves = _reference_first(curves_of(measurements.points), question.reference)
    wanted = [(form, curve) for form in question.forms for curve in curves]
    skipped = [
        (form, curve)
        for form, curve in wanted
        if len(question.forms) > 1 and len(curve.means) < fewest_sizes(form)
    ]
    fits = [fit_curve(curve, form) for form, curve in wanted if (form, curve) not in skipped]
    sure = [
        SureFit(fit, constant_intervals(fit, question.resamples, question.seed)) for fit in fits
    ]
    comparisons = [
        _comparison(reference, other, question)
        for reference in fits
        if reference.curve is curves[0]
        for other in fits
        if other.form is reference.form and other is not reference
    ]
    return Study(measurements, tuple(curves), tuple(sure), tuple(comparisons), tuple(skipped))


def reference_of(names: Sequence[str], asked: str | None) -> str:
    """The curve that others are compared with.

    Raises:
        InputError: one that is not there.
    """
    if asked is None:
        return "baseline" if "baseline" in names else names[0]
    if asked not in names:
        raise InputError(f"--baseline {asked}: no such curve; there are {', '.join(names)}")
    return asked


def _reference_first(curves: Sequence[Curve], asked: str | None) -> list[Curve]:
    name = reference_of([curve.name for curve in curves], asked)
    return sorted(curves, key=lambda curve: curve.name != name)


def _comparison(reference: Fit, other: Fit, question: Question) -> Comparison:
    shared = min(reference.curve.largest, other.curve.largest)
    compute = shared if question.at is None else question.at
    at = advantage_of(reference, other, [compute], question.resamples, question.seed)
    return Comparison(reference, other, compute, at, _over_range(reference, other, question))


def _over_range(reference: Fit, other: Fit, question: Question) -> RangeAdvantage | None:
    ends = [(fit.curve.smallest, fit.curve.largest) for fit in (reference, other)]
    low, high = common_range(*ends)
    if low >= high:
        return None
    computes = spread_over(low, high)
    factors = [compute_factor(reference.law, other.law, compute) for compute in computes]
    mean = advantage_of(reference, other, computes, question.resamples, question.seed)
    return RangeAdvantage(low, high, mean, min(factors), max(factors))
