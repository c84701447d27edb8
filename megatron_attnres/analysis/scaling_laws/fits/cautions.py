"""What the data cannot carry, said in a line each. Pure but for scipy's quantiles."""

import math
from collections.abc import Iterator

import numpy as np

from megatron_attnres.analysis.scaling_laws.fits.fitting import Fit
from megatron_attnres.analysis.scaling_laws.fits.power_law import Form
from megatron_attnres.analysis.scaling_laws.fits.study import Comparison, Study, SureFit
from megatron_attnres.analysis.scaling_laws.measurements.points import Curve

FEWEST_SIZES = 4
# Of the reference's largest compute: the factor itself looks beyond what is measured.
FURTHEST_REACH = 2.0
BENT_PROBABILITY = 0.05
ROUNDING = 1e-9


def cautions_of(study: Study) -> list[str]:
    """All, those about the data first."""
    return [
        *_of_choices(study),
        *(line for curve in study.curves for line in _of_curve(curve)),
        *(
            f"{curve.name}: {len(curve.means)} points are too few for the form {form}, which is "
            "left out"
            for form, curve in study.skipped
        ),
        *(line for fit in study.fits for line in _of_fit(fit)),
        *(line for comparison in study.comparisons for line in _of_comparison(comparison, study)),
    ]


def _of_choices(study: Study) -> Iterator[str]:
    for choice in study.measurements.choices:
        if choice.is_at_edge:
            tried = ", ".join(f"{rate:g}" for rate in choice.tried)
            yield (
                f"{choice.curve}, {choice.size}: the best learning rate {choice.learning_rate:g} "
                f"is at the edge of those tried ({tried}); a better one may lie beyond"
            )


def _of_curve(curve: Curve) -> Iterator[str]:
    if curve.size_count < FEWEST_SIZES:
        yield f"{curve.name}: {curve.size_count} sizes; fewer than {FEWEST_SIZES} show no law"
    if curve.seed_spread is None:
        yield f"{curve.name}: no size has two seeds, so chance between seeds is not known"


def _of_fit(sure: SureFit) -> Iterator[str]:
    fit, intervals = sure.fit, sure.intervals
    where = f"{fit.curve.name}, form {fit.form}"
    if not math.isfinite(intervals["exponent"].high) and fit.form is Form.POWER:
        yield f"{where}: as many constants as points, so there are no intervals"
    elif intervals["exponent"].low <= 0:
        yield f"{where}: the exponent's interval reaches 0: that loss falls is not shown"
    if fit.form is Form.OFFSET:
        offset = intervals["offset"]
        losses = [mean.loss for mean in fit.curve.means]
        if offset.low <= 0 or offset.high - offset.low > max(losses) - min(losses):
            yield (
                f"{where}: the offset is not identified: its interval is {offset.low:.3g} to "
                f"{offset.high:.3g}, and the losses {min(losses):.4g} to {max(losses):.4g}"
            )
    elif (probability := bend_probability(fit)) < BENT_PROBABILITY:
        yield (
            f"{where}: the residuals bend (chance would do so with probability "
            f"{probability:.2g}): not one power law over this range"
        )


def bend_probability(fit: Fit) -> float:
    """Of a bend in the residuals as large as this one by chance; 1 if it cannot be told."""
    from scipy import stats

    x, y = fit.log_compute, fit.log_losses
    degrees = len(x) - 3
    if degrees < 1 or len(set(x.tolist())) < 4:
        return 1.0
    columns = np.stack((np.ones_like(x), x, x**2), axis=1)
    constants = np.linalg.lstsq(columns, y, rcond=None)[0]
    noise = math.sqrt(float(((y - columns @ constants) ** 2).sum()) / degrees)
    error = noise * math.sqrt(float(np.linalg.inv(columns.T @ columns)[2, 2]))
    if abs(constants[2]) * np.abs(x).max() ** 2 < ROUNDING:
        return 1.0
    return float(2 * stats.t.sf(abs(constants[2]) / max(error, ROUNDING**2), degrees))


def _of_comparison(comparison: Comparison, study: Study) -> Iterator[str]:
    reference, other = comparison.reference, comparison.other
    where = f"{other.curve.name} over {reference.curve.name}, form {comparison.form}"
    yield from (f"{where}: {line}" for line in _of_reach(comparison))
    measured = [("at the chosen compute", comparison.at)]
    if comparison.over_range is None:
        yield f"{where}: both measure no compute in common, so no advantage over a range is given"
    else:
        measured.append(("over the measured range", comparison.over_range.mean))
    for place, advantage in measured:
        low, high = advantage.interval.low, advantage.interval.high
        if low <= 1 <= high:
            yield (
                f"{where}: the compute advantage's interval {place}, {low:.3g} to {high:.3g}, "
                "holds 1: no difference is shown"
            )
    exponents = [
        sure.intervals["exponent"] for sure in study.fits if sure.fit in (reference, other)
    ]
    if max(one.low for one in exponents) <= min(one.high for one in exponents):
        yield f"{where}: the exponents' intervals overlap: that the advantage changes is not shown"
    yield from (f"{where}: {line}" for line in _of_seeds(comparison))


def _of_reach(comparison: Comparison) -> Iterator[str]:
    for fit in (comparison.reference, comparison.other):
        least, most, compute = fit.curve.smallest, fit.curve.largest, comparison.compute
        # A touch of rounding: the largest compute, typed again, is no extrapolation.
        factor = max(compute / most, least / compute)
        if factor > 1 + 1e-6:
            yield (
                f"extrapolation: {compute:.3g} PFLOP/s-days lie a factor {factor:.3g} outside of "
                f"what {fit.curve.name} measures ({least:.3g} to {most:.3g})"
            )
    factor = comparison.at.factor
    if math.isinf(factor):
        yield "the reference never gets to this loss, as fitted"
        return
    reach = factor * comparison.compute / comparison.reference.curve.largest
    if reach > FURTHEST_REACH and factor > 1:
        yield (
            f"extrapolation: the factor {factor:.3g} reads {comparison.reference.curve.name} a "
            f"factor {reach:.3g} beyond its largest compute"
        )


def _of_seeds(comparison: Comparison) -> Iterator[str]:
    spreads = [
        spread
        for fit in (comparison.reference, comparison.other)
        if (spread := fit.curve.seed_spread) is not None
    ]
    reference, law = comparison.reference.law, comparison.other.law
    gap = abs(math.log(reference.loss(comparison.compute) / law.loss(comparison.compute)))
    if spreads and max(spreads) > gap:
        yield (
            f"seeds of one size spread by {max(spreads):.2%} of the loss, more than the curves "
            f"differ ({gap:.2%})"
        )
