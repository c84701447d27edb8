"""How sure a fit's constants are: 95 % intervals, from few sizes. No torch.

The percentile bootstrap covers far less than it claims with 4 to 8 points: residuals are smaller
than the noise, and resamples of five residuals are few. Three things are done instead. Resamples
are drawn with normal noise of the size that the residuals show, degrees of freedom accounted for.
What is resampled is a ratio that hardly depends on the unknown constants: how much worse the fit is
with a constant held at its true value, in units of its own noise. And an interval holds all values
at which the measured losses are no worse than 95 % of resamples are: near a bound, and where an
offset is hardly told from a power law, it is as wide and as lopsided as the data ask for.
"""

import math
from dataclasses import dataclass

import numpy as np

from megatron_attnres.analysis.scaling_laws.fits.fitting import Fit
from megatron_attnres.analysis.scaling_laws.fits.many_fits import (
    Array,
    ManyFits,
    fit_many,
    predicted,
)

LEVEL = 0.95
# The quantile of a few hundred resamples is itself not sure; the upper end of its own 98 % interval
# is taken, so that intervals err on the wide side.
QUANTILE_MARGIN = 2.326
# Distances from the estimate at which an interval's ends are looked for, as powers of two.
DISTANCES = 2.0 ** np.arange(-10, 12.5, 0.5)
BETWEEN = 24


@dataclass(frozen=True)
class Interval:
    """95 %. An end that the data do not bound is infinite."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a value is in it."""
        return self.low <= value <= self.high


UNBOUNDED = Interval(-math.inf, math.inf)


def constant_intervals(fit: Fit, resamples: int, seed: int) -> dict[str, Interval]:
    """Intervals of a fit's constants, by the names of PowerLaw's fields.

    Args:
        fit: of a curve.
        resamples: how many.
        seed: of the noise.
    """
    names = fit.form.constants
    if len(fit.curve.means) <= len(names):
        # The law goes through every point: nothing tells how large the noise is.
        return dict.fromkeys(names, UNBOUNDED)
    noise = np.random.default_rng(seed).standard_normal((resamples, len(fit.curve.means)))
    losses = predicted(fit.log_compute, fit.constants[None]) + fit.scale * noise
    refits = fit_many(fit.log_compute, losses, fit.free)
    return {name: _interval(fit, index, losses, refits) for index, name in enumerate(names)}


def upper_quantile(ratios: Array) -> float:
    """What ``LEVEL`` of the ratios lie below, on the safe side of what their number can tell."""
    margin = QUANTILE_MARGIN * math.sqrt(LEVEL * (1 - LEVEL) / len(ratios))
    return float(np.quantile(ratios, min(LEVEL + margin, 1.0)))


def _interval(fit: Fit, index: int, losses: Array, refits: ManyFits) -> Interval:
    """Of one constant; A's is found in its logarithm."""
    # A is a's value where log compute is 0, and not at its centre.
    x = fit.log_compute + (fit.centre if index == 0 else 0.0)
    estimate = math.log(fit.law.coefficient) if index == 0 else float(fit.constants[index])
    held = _holding(fit, index, np.full(len(losses), estimate))
    restricted = fit_many(x, losses, held, refits.scales)
    ratios = (restricted.objectives - refits.objectives) / refits.scales**2
    limit = upper_quantile(ratios)

    def ratio_at(values: Array) -> Array:
        measured = np.tile(fit.log_losses, (len(values), 1))
        scales = np.full(len(values), fit.scale)
        held = _holding(fit, index, values)
        objectives = fit_many(x, measured, held, scales).objectives
        best = fit_many(fit.log_compute, measured[:1], fit.free, scales[:1]).objectives
        return (objectives - best) / fit.scale**2 - limit

    unit = max(abs(estimate), 0.01)
    smallest = -math.inf if index == 0 else 0.0
    ends = [_crossing(estimate, sign * unit, smallest, ratio_at) for sign in (-1, 1)]
    if index == 0:
        return Interval(*(math.exp(min(end, 700.0)) if end < 700 else math.inf for end in ends))
    return Interval(*ends)


def _holding(fit: Fit, index: int, values: Array) -> Array:
    held = np.tile(fit.free, (len(values), 1))
    held[:, index] = values
    return held


def _crossing(estimate: float, unit: float, smallest: float, ratio_at) -> float:  # noqa: ANN001
    """Where a ratio rises above its limit, going from the estimate in units; or the bound."""
    bound = smallest if unit < 0 else math.inf
    values = estimate + unit * DISTANCES
    values = values[values > smallest]
    if math.isfinite(bound):
        values = np.append(values, bound)
    outside = np.flatnonzero(ratio_at(values) > 0)
    if not len(outside):
        return bound
    first = outside[0]
    nearer = values[first - 1] if first else estimate
    between = np.linspace(nearer, values[first], BETWEEN)
    ratios = ratio_at(between)
    after = int(np.argmax(ratios > 0))
    if after == 0:
        return float(between[0])
    share = -ratios[after - 1] / (ratios[after] - ratios[after - 1])
    return float(between[after - 1] + share * (between[after] - between[after - 1]))
