"""One curve's power law, by a robust fit from many starts. No torch."""

import math
from dataclasses import dataclass

import numpy as np

from megatron_attnres.analysis.scaling_laws.fits.many_fits import (
    OFFSET_SHARES,
    SMALLEST_SCALE,
    THRESHOLD,
    Array,
    fit_many,
    gradients,
    huber,
    predicted,
    scale_of,
)
from megatron_attnres.analysis.scaling_laws.fits.power_law import Form, PowerLaw
from megatron_attnres.analysis.scaling_laws.measurements.points import Curve
from megatron_attnres.errors import InputError

# Exponents from which fits start, in those of the power law through what is above the offset.
EXPONENT_FACTORS = (0.6, 1.0, 1.6)
# Of the descents: enough to tell the starts apart, and to the last digits.
COARSE, FINE = 1e-3, 1e-13
ROUNDS = 60
# Of A, which is the loss at 1 PFLOP/s-day; beyond, it leaves a float's range.
LARGEST_LOG_COEFFICIENT = 600.0
NEGLIGIBLE = 1e-3


@dataclass(frozen=True)
class Fit:
    """A curve's power law.

    Attributes:
        curve: what it was fitted to.
        form: which constants were free.
        law: the constants.
        scale: standard deviation of the noise in a size's log L, degrees of freedom accounted for.
        residuals: log L of each size less the law's.
    """

    curve: Curve
    form: Form
    law: PowerLaw
    scale: float
    residuals: tuple[float, ...]

    @property
    def log_compute(self) -> Array:
        """[n], of the sizes, less its mean: fits run in units of the compute's geometric mean."""
        return centred_log_compute(self.curve)[0]

    @property
    def log_losses(self) -> Array:
        """[n], of the sizes."""
        return np.log([mean.loss for mean in self.curve.means])

    @property
    def centre(self) -> float:
        """Mean of log compute."""
        return centred_log_compute(self.curve)[1]

    @property
    def constants(self) -> Array:
        """[3]: a, alpha, E of many_fits.py, at centred compute."""
        law = self.law
        a = math.log(law.coefficient) - law.exponent * self.centre
        return np.array((a, law.exponent, law.offset))

    @property
    def free(self) -> Array:
        """[3]: NaN where the form is free, 0 for the offset of a plain power law."""
        return free_constants(self.form)


def free_constants(form: Form) -> Array:
    """[3]: NaN where a form is free, 0 for the offset of a plain power law."""
    return np.array((np.nan, np.nan, 0.0 if form is Form.POWER else np.nan))


def centred_log_compute(curve: Curve) -> tuple[Array, float]:
    """Log compute of the sizes less its mean, and the mean."""
    logs = np.log([mean.compute for mean in curve.means])
    return logs - logs.mean(), float(logs.mean())


def fewest_sizes(form: Form) -> int:
    """Points that a form needs: an offset needs one more than it has constants."""
    return 2 if form is Form.POWER else len(form.constants) + 1


def fit_curve(curve: Curve, form: Form) -> Fit:
    """Fit a curve. Deterministic.

    Raises:
        InputError: fewer points than the form needs, or a loss that does not fall with compute.
    """
    if len(curve.means) < fewest_sizes(form):
        raise InputError(
            f"--form {form}: curve {curve.name} has {len(curve.means)} points, and "
            f"{fewest_sizes(form)} are needed; give more sizes, or --form power"
        )
    x, centre = centred_log_compute(curve)
    y = np.log([mean.loss for mean in curve.means])
    constants, scale = _best(x, y, form)
    if constants[1] <= 0:
        raise InputError(
            f"{curve.points[0].run}: the losses of curve {curve.name} do not fall with compute "
            f"(exponent {constants[1]:.3f}); look for runs that went wrong, and leave them out "
            "with --exclude"
        )
    log_coefficient = float(constants[0] + constants[1] * centre)
    if abs(log_coefficient) > LARGEST_LOG_COEFFICIENT:
        raise InputError(
            f"{curve.points[0].run}: curve {curve.name} is too steep for a power law (exponent "
            f"{constants[1]:.3g}); look at its compute and losses, or leave it out with --exclude"
        )
    coefficient = math.exp(log_coefficient)
    law = PowerLaw(coefficient, float(constants[1]), float(constants[2]))
    residuals = y - predicted(x, constants[None])[0]
    return Fit(curve, form, law, scale, tuple(residuals.tolist()))


def _best(x: Array, y: Array, form: Form) -> tuple[Array, float]:
    """The constants and the scale, which depend on each other, in turns."""
    degrees = len(x) - len(form.constants)
    scale = fit_many(x, y[None], free_constants(form)).scales
    fits = [_descend(x, y, start, form, float(scale[0]), COARSE) for start in _starts(x, y, form)]
    constants = min(fits, key=lambda one: huber(_residuals(x, y, one)[None], scale)[0])
    for _ in range(ROUNDS):
        constants = _descend(x, y, constants, form, float(scale[0]), FINE)
        before, scale = scale, scale_of(_residuals(x, y, constants)[None], scale, degrees)
        if abs(scale[0] - before[0]) <= 1e-6 * before[0]:
            break
    if form is Form.OFFSET and constants[2] < NEGLIGIBLE * math.exp(y.min()):
        constants, scale = _at_bound(x, y, constants, scale)
    return constants, float(scale[0])


def _starts(x: Array, y: Array, form: Form) -> list[Array]:
    shares = OFFSET_SHARES if form is Form.OFFSET else (0.0,)
    starts = []
    for share in shares:
        offset = share * math.exp(y.min())
        held = np.array((np.nan, np.nan, offset))
        a, alpha, _ = fit_many(x, y[None], held).constants[0]
        starts += [np.array((a, alpha * factor, offset)) for factor in EXPONENT_FACTORS]
    return starts


def _descend(x: Array, y: Array, start: Array, form: Form, scale: float, tolerance: float) -> Array:
    from scipy.optimize import least_squares

    count = len(form.constants)
    rest = start[count:]

    def whole(free: Array) -> Array:
        return np.concatenate((free, rest))

    found = least_squares(
        lambda free: _residuals(x, y, whole(free)) / scale,
        start[:count],
        jac=lambda free: -gradients(x, whole(free)[None])[0, :, :count] / scale,
        bounds=([-np.inf, -np.inf, 0.0][:count], np.inf),
        loss="huber",
        f_scale=THRESHOLD,
        x_scale="jac",
        ftol=tolerance,
        xtol=tolerance,
        gtol=tolerance,
    )
    return whole(found.x)


def _at_bound(x: Array, y: Array, constants: Array, scale: Array) -> tuple[Array, Array]:
    """The fit with E = 0 where that is as good: scipy comes close to a bound, and not to it."""
    bound = fit_many(x, y[None], np.array((np.nan, np.nan, 0.0)), scale)
    near = huber(_residuals(x, y, constants)[None], scale)[0]
    if bound.objectives[0] > near + 1e-6 * scale[0] ** 2:
        return constants, scale
    return bound.constants[0], np.maximum(scale, SMALLEST_SCALE)


def _residuals(x: Array, y: Array, constants: Array) -> Array:
    return y - predicted(x, constants[None])[0]
