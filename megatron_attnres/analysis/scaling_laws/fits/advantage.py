"""Compute advantage of one curve over another: the factor that the other needs to be as good.

No torch. At one compute C it is the k with L_reference(k C) = L(C). Over a range it is the one
factor k at which both are as good on average over log C; between plain power laws, that is the
geometric mean of the factors at each C.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_attnres.analysis.scaling_laws.fits.fitting import Fit
from megatron_attnres.analysis.scaling_laws.fits.intervals import (
    UNBOUNDED,
    Interval,
    upper_quantile,
)
from megatron_attnres.analysis.scaling_laws.fits.many_fits import (
    CONSISTENCY,
    THRESHOLD,
    Array,
    fit_many,
    gradients,
    predicted,
)
from megatron_attnres.analysis.scaling_laws.fits.power_law import PowerLaw

POINTS_OF_RANGE = 17
# Of log k: a factor beyond this is called infinite.
LARGEST_LOG_FACTOR = math.log(1e6)
LOG_FACTORS = np.concatenate(
    (np.linspace(0.002, 0.5, 250), np.geomspace(0.51, 2 * LARGEST_LOG_FACTOR, 250))
)
STRONGEST_CORRELATION = 0.995


@dataclass(frozen=True)
class Advantage:
    """A compute advantage.

    Attributes:
        factor: above 1: the reference needs that much more compute; infinite: it never gets there.
        interval: of the factor.
    """

    factor: float
    interval: Interval


def compute_factor(reference: PowerLaw, law: PowerLaw, compute: float) -> float:
    """Compute advantage of a law over a reference at ``compute`` PFLOP/s-days."""
    return reference.compute(law.loss(compute)) / compute


def factor_over(reference: PowerLaw, law: PowerLaw, computes: Sequence[float]) -> float:
    """The one factor at which both are as good on average over several computes."""
    x = np.log(np.asarray(computes))
    return _factor(_solve((x, x), [_constants_of(one) for one in (reference, law)]))


def common_range(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Where both are measured; empty (low above high) if nowhere."""
    return max(first[0], second[0]), min(first[1], second[1])


def spread_over(low: float, high: float) -> list[float]:
    """Computes of a range, evenly in their logarithm."""
    return [float(one) for one in np.geomspace(low, high, POINTS_OF_RANGE)]


def advantage_of(
    reference: Fit, fit: Fit, computes: Sequence[float], resamples: int, seed: int
) -> Advantage:
    """Compute advantage of a fit over a reference, on average over several computes, or at one.

    The noise of both curves is resampled together: where both have the same sizes, whose data and
    seeds are often the same, with the correlation that their residuals show.
    """
    x = np.log(np.asarray(computes))
    at = (x - reference.centre, x - fit.centre)
    log_factor = _solve(at, [reference.constants[None], fit.constants[None]])
    if any(len(one.curve.means) <= len(one.form.constants) for one in (reference, fit)):
        return Advantage(_factor(log_factor), UNBOUNDED)
    pair = _Pair(reference, fit, at)
    limit = _limit(pair, log_factor, resamples, seed)

    def is_outside(log_factors: Array) -> Array:
        rows = [np.tile(one.constants, (len(log_factors), 1)) for one in (reference, fit)]
        covariance = pair.covariance(
            [np.array([one.scale]) for one in (reference, fit)],
            [np.array([one.residuals]) for one in (reference, fit)],
        )
        errors = pair.errors(log_factors[:, None], rows, covariance)
        return np.abs(_gaps(at, log_factors[:, None], rows)) > limit * errors

    return Advantage(_factor(log_factor), _interval(log_factor, is_outside))


@dataclass(frozen=True)
class _Pair:
    """Two fits, and the log computes [m] at which they are compared, centred for each."""

    reference: Fit
    fit: Fit
    at: tuple[Array, Array]

    @property
    def has_same_sizes(self) -> bool:
        """Whether residuals belong to each other."""
        sizes = [[mean.size for mean in one.curve.means] for one in (self.reference, self.fit)]
        return sizes[0] == sizes[1]

    def covariance(self, scales: Sequence[Array], residuals: Sequence[Array]) -> Array:
        """[B, 2, 2]: of both curves' noise, from scales [B] and residuals [B, n]."""
        both = np.zeros((len(scales[0]), 2, 2))
        both[:, 0, 0], both[:, 1, 1] = scales[0] ** 2, scales[1] ** 2
        if self.has_same_sizes:
            clipped = [
                np.clip(one, -THRESHOLD * scale[:, None], THRESHOLD * scale[:, None])
                for one, scale in zip(residuals, scales, strict=True)
            ]
            degrees = residuals[0].shape[1] - len(self.fit.form.constants)
            products = (clipped[0] * clipped[1]).sum(axis=1) / (degrees * CONSISTENCY)
            most = STRONGEST_CORRELATION * scales[0] * scales[1]
            both[:, 0, 1] = both[:, 1, 0] = np.clip(products, -most, most)
        return both

    def errors(self, log_factor: Array, constants: Sequence[Array], covariance: Array) -> Array:
        """[B]: standard errors of the gaps, by how each size moves them."""
        reference, fit = constants
        moves = (
            _moves(self.at[0] + log_factor, self.reference.log_compute, reference),
            -_moves(self.at[1] + 0 * log_factor, self.fit.log_compute, fit),
        )
        variance = sum(covariance[:, i, i] * (moves[i] ** 2).sum(axis=1) for i in range(len(moves)))
        if self.has_same_sizes:
            variance = variance + 2 * covariance[:, 0, 1] * (moves[0] * moves[1]).sum(axis=1)
        return np.sqrt(variance)


def _limit(pair: _Pair, log_factor: float, resamples: int, seed: int) -> float:
    """Gaps in standard errors that resamples stay below."""
    fits, generator = (pair.reference, pair.fit), np.random.default_rng(seed)
    covariance = pair.covariance(
        [np.array([one.scale]) for one in fits], [np.array([one.residuals]) for one in fits]
    )[0]
    noise = [
        generator.standard_normal((resamples, len(one.curve.means))) * one.scale for one in fits
    ]
    if pair.has_same_sizes:
        correlation = covariance[0, 1] / (fits[0].scale * fits[1].scale)
        own = noise[1] * math.sqrt(1 - correlation**2)
        noise[1] = noise[0] * (fits[1].scale / fits[0].scale) * correlation + own
    refits = [
        fit_many(one.log_compute, predicted(one.log_compute, one.constants[None]) + draws, one.free)
        for one, draws in zip(fits, noise, strict=True)
    ]
    constants = [one.constants for one in refits]
    covariances = pair.covariance([one.scales for one in refits], [one.residuals for one in refits])
    factor = np.full((resamples, 1), log_factor)
    true_gap = _gaps(pair.at, factor[:1], [one.constants[None] for one in fits])
    gaps = _gaps(pair.at, factor, constants) - true_gap
    return upper_quantile(np.abs(gaps) / pair.errors(factor, constants, covariances))


def _gaps(at: Sequence[Array], log_factor: Array, constants: Sequence[Array]) -> Array:
    """[B]: log L_reference(k C) - log L(C), on average over the computes."""
    reference = predicted(at[0] + log_factor, constants[0])
    return (reference - predicted(at[1][None], constants[1])).mean(axis=1)


def _moves(at: Array, log_compute: Array, constants: Array) -> Array:
    """[B, n]: how far each size's log L moves the fit's mean log L at ``at`` [B, m]."""
    wanted = gradients(at, constants).mean(axis=1)
    inverse = np.linalg.pinv(gradients(log_compute, constants), rcond=1e-7)
    return np.einsum("bi,bin->bn", wanted, inverse)


def _solve(at: Sequence[Array], constants: Sequence[Array]) -> float:
    """Log of the factor at which there is no gap; infinite if there is none."""
    from scipy.optimize import brentq

    def gap(log_factor: float) -> float:
        return float(_gaps(at, np.array([[log_factor]]), constants)[0])

    if gap(LARGEST_LOG_FACTOR) > 0:
        return LARGEST_LOG_FACTOR
    if gap(-LARGEST_LOG_FACTOR) < 0:
        return -LARGEST_LOG_FACTOR
    return brentq(gap, -LARGEST_LOG_FACTOR, LARGEST_LOG_FACTOR, xtol=1e-12)


def _interval(log_factor: float, is_outside: Callable[[Array], Array]) -> Interval:
    """The factors around the estimate that are not outside."""
    ends = []
    for sign in (-1, 1):
        values = log_factor + sign * LOG_FACTORS
        outside = np.flatnonzero(is_outside(values))
        if not len(outside):
            ends.append(sign * LARGEST_LOG_FACTOR)
            continue
        first = outside[0]
        nearer = values[first - 1] if first else log_factor
        between = np.linspace(nearer, values[first], 50)
        ends.append(float(between[np.argmax(is_outside(between))]))
    return Interval(_factor(ends[0]), _factor(ends[1]))


def _factor(log_factor: float) -> float:
    if log_factor >= LARGEST_LOG_FACTOR:
        return math.inf
    return 0.0 if log_factor <= -LARGEST_LOG_FACTOR else math.exp(log_factor)


def _constants_of(law: PowerLaw) -> Array:
    return np.array([[math.log(law.coefficient), law.exponent, law.offset]])
