"""Many robust fits at once: the same sizes, resampled losses or constants held. No torch.

One formula serves both forms: log L = log(E + exp(a - alpha x)), x = log C; the plain power law
holds E at 0. The fit minimises Huber's loss of the residuals of log L, as Hoffmann et al. (2022)
do, but with the threshold in units of the residuals' scale, estimated along with the constants
(Huber's "proposal 2"): a fixed threshold far below the noise would fit the median, and throw much
of what five points say away.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# In scales: 95 % of least squares' efficiency where residuals are normal.
THRESHOLD = 1.345
# Mean of min(z^2, THRESHOLD^2) of a normal z: makes the scale a standard deviation.
_TAIL = math.erfc(THRESHOLD / math.sqrt(2))
CONSISTENCY = (
    (1 - _TAIL)
    - 2 * THRESHOLD * math.exp(-(THRESHOLD**2) / 2) / math.sqrt(2 * math.pi)
    + THRESHOLD**2 * _TAIL
)
# Below this the residuals are rounding.
SMALLEST_SCALE = 1e-9
# Offsets from which fits start, as shares of the smallest loss.
OFFSET_SHARES = (0.0, 0.3, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
ITERATIONS = 40
LARGEST_EXPONENT_OF_E = 60.0


@dataclass(frozen=True)
class ManyFits:
    """Fits of B sets of losses.

    Attributes:
        constants: [B, 3]: a, alpha, E.
        objectives: [B]: sums of Huber's loss.
        scales: [B]: standard deviations of the noise in log L.
        residuals: [B, n]: log L minus the fit's.
    """

    constants: Array
    objectives: Array
    scales: Array
    residuals: Array


def fit_many(
    log_compute: Array, log_losses: Array, held: Array, scales: Array | None = None
) -> ManyFits:
    """Fit every row.

    Args:
        log_compute: [n], of the sizes.
        log_losses: [B, n].
        held: [B, 3] or [3]: a, alpha, E; NaN where the fit is free, alike in all rows.
        scales: [B], to use; estimated from n less free constants degrees of freedom if not given.
    """
    rows, sizes = log_losses.shape
    held = np.broadcast_to(held, (rows, 3))
    free = np.isnan(held[0])
    constants = _starts(log_compute, log_losses, held)
    degrees = sizes - int(free.sum())
    residuals = log_losses - predicted(log_compute, constants)
    estimate = scales is None
    if estimate:
        start = np.sqrt((residuals**2).sum(axis=1) / max(degrees, 1))
        scales = np.maximum(start, SMALLEST_SCALE)
    damping = np.full(rows, 1e-4)
    for _ in range(ITERATIONS):
        objectives = huber(residuals, scales)
        proposed = _step(log_compute, residuals, constants, free, scales, damping)
        tried = log_losses - predicted(log_compute, proposed)
        better = huber(tried, scales) <= objectives
        moved = np.abs(tried - residuals).max(axis=1) > 1e-7 * scales
        constants = np.where(better[:, None], proposed, constants)
        residuals = np.where(better[:, None], tried, residuals)
        damping = np.clip(np.where(better, damping / 8, damping * 8), 1e-10, 1e8)
        before = scales
        if estimate:
            scales = scale_of(residuals, scales, degrees)
        if not (moved & better).any() and np.abs(scales / before - 1).max() < 1e-5:
            break
    return ManyFits(constants, huber(residuals, scales), scales, residuals)


def predicted(log_compute: Array, constants: Array) -> Array:
    """log L of [B, 3] constants at [n] or [B, n] computes: [B, n]."""
    a, alpha, offset = constants[:, :1], constants[:, 1:2], constants[:, 2:]
    return np.log(offset + np.exp(_bounded(a - alpha * log_compute)))


def gradients(log_compute: Array, constants: Array) -> Array:
    """Of log L by a, alpha, E: [B, n, 3]."""
    a, alpha, offset = constants[:, :1], constants[:, 1:2], constants[:, 2:]
    power = np.exp(_bounded(a - alpha * log_compute))
    loss = offset + power
    return np.stack((power / loss, -log_compute * power / loss, 1 / loss), axis=2)


def huber(residuals: Array, scales: Array) -> Array:
    """Huber's loss, summed over the last axis."""
    sizes, threshold = np.abs(residuals), THRESHOLD * scales[:, None]
    inner = np.minimum(sizes, threshold)
    return (inner * (sizes - inner / 2)).sum(axis=1)


def scale_of(residuals: Array, scales: Array, degrees: int) -> Array:
    """One round of Huber's estimate of the noise's standard deviation."""
    inner = np.minimum(np.abs(residuals), THRESHOLD * scales[:, None])
    squares = (inner**2).sum(axis=1) / (max(degrees, 1) * CONSISTENCY)
    return np.maximum(np.sqrt(squares), SMALLEST_SCALE)


def _bounded(exponent: Array) -> Array:
    return np.clip(exponent, -LARGEST_EXPONENT_OF_E, LARGEST_EXPONENT_OF_E)


def _step(
    x: Array,
    residuals: Array,
    constants: Array,
    free: NDArray[np.bool_],
    scales: Array,
    damping: Array,
) -> Array:
    """Levenberg-Marquardt on the reweighted squares, with E kept at 0 or above."""
    threshold = THRESHOLD * scales[:, None]
    weights = threshold / np.maximum(np.abs(residuals), threshold)
    slopes = gradients(x, constants)
    active = np.broadcast_to(free, constants.shape).copy()
    pull = np.einsum("bni,bn,bn->bi", slopes, weights, residuals)
    # An offset at its bound that would go below stays there, and the others move without it.
    active[:, 2] &= (constants[:, 2] > 0) | (pull[:, 2] > 0)
    slopes = slopes * active[:, None, :]
    curvature = np.einsum("bni,bn,bnj->bij", slopes, weights, slopes)
    diagonal = np.einsum("bii->bi", curvature)
    diagonal *= 1 + damping[:, None]
    diagonal += np.where(active, 1e-14, 1.0)
    step = np.linalg.solve(curvature, (pull * active)[..., None])[..., 0]
    moved = constants + step
    moved[:, 2] = np.maximum(moved[:, 2], 0.0)
    return moved


def _starts(x: Array, log_losses: Array, held: Array) -> Array:
    """For every row the best of several offsets, each with a power law through what is above."""
    losses = np.exp(log_losses)
    best = np.full((len(losses), 3), np.nan)
    lowest = np.full(len(losses), np.inf)
    offsets = (
        [share * losses.min(axis=1) for share in OFFSET_SHARES]
        if np.isnan(held[0, 2])
        else [held[:, 2]]
    )
    for offset in offsets:
        candidate = _power_law_above(x, losses, offset, held)
        missed = np.abs(log_losses - predicted(x, candidate)).sum(axis=1)
        closer = missed < lowest
        best = np.where(closer[:, None], candidate, best)
        lowest = np.where(closer, missed, lowest)
    return best


def _power_law_above(x: Array, losses: Array, offset: Array, held: Array) -> Array:
    """A line through log(L - E), weighted so that its residuals are those of log L."""
    above = np.maximum(losses - offset[:, None], 1e-3 * losses)
    weights, heights = (above / losses) ** 2, np.log(above)
    mean_x = (weights * x).sum(axis=1) / weights.sum(axis=1)
    mean_y = (weights * heights).sum(axis=1) / weights.sum(axis=1)
    a, alpha = held[:, 0], held[:, 1]
    if np.isnan(alpha[0]) and np.isnan(a[0]):
        across = x - mean_x[:, None]
        alpha = -(weights * across * heights).sum(axis=1) / (weights * across**2).sum(axis=1)
    elif np.isnan(alpha[0]):
        alpha = (weights * x * (a[:, None] - heights)).sum(axis=1) / (weights * x**2).sum(axis=1)
    a = mean_y + alpha * mean_x if np.isnan(a[0]) else a
    return np.stack((a, alpha, offset), axis=1)
