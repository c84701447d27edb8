"""Fits find the constants they were made from, and are not led astray by one run."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_attnres.analysis.scaling_laws.fits.fitting import fit_curve
from megatron_attnres.analysis.scaling_laws.fits.many_fits import fit_many
from megatron_attnres.analysis.scaling_laws.fits.power_law import Form, PowerLaw
from megatron_attnres.analysis.scaling_laws.measurements.points import curves_of
from megatron_attnres.errors import InputError
from tests.analysis.scaling_laws.synthetic import PAPER, points_of

BENT = PowerLaw(0.9, 0.16, 1.0)
WIDE = tuple(np.geomspace(0.01, 10, 6).tolist())


def curve_of(law, *arguments, **keys):
    return curves_of(points_of("baseline", law, *arguments, **keys))[0]


@settings(max_examples=20, deadline=None)
@given(st.floats(0.3, 5), st.floats(0.02, 0.4), st.floats(-8, 2).map(lambda power: 10**power))
def test_exact_power_laws_are_found(coefficient, exponent, smallest):
    law = PowerLaw(coefficient, exponent)
    found = fit_curve(curve_of(law, [smallest * step for step in (1, 3, 8, 30)]), Form.POWER).law
    assert found.exponent == pytest.approx(exponent, rel=1e-6)
    assert found.coefficient == pytest.approx(coefficient, rel=1e-5)


def test_exact_offsets_are_found():
    found = fit_curve(curve_of(BENT, WIDE), Form.OFFSET).law
    assert (found.coefficient, found.exponent, found.offset) == pytest.approx(
        (0.9, 0.16, 1.0), rel=1e-4
    )


def test_a_power_law_has_no_offset():
    found = fit_curve(curve_of(PAPER["baseline"], WIDE), Form.OFFSET).law
    assert found.offset == pytest.approx(0, abs=1e-3)


def test_one_run_that_went_wrong_moves_the_fit_little():
    points = points_of("baseline", PAPER["baseline"], (*WIDE, 20.0, 40.0), noise=0.001)
    right = fit_curve(curves_of(points)[0], Form.POWER).law
    points[-1] = replace(points[-1], loss=points[-1].loss * 1.1)
    robust = fit_curve(curves_of(points)[0], Form.POWER).law
    logs = [[math.log(p.flops), math.log(p.loss)] for p in points]
    squares = -np.polyfit(*np.transpose(logs), 1)[0]
    assert abs(robust.exponent - right.exponent) < 0.3 * abs(squares - right.exponent)


@pytest.mark.parametrize("form", list(Form))
def test_many_fits_at_once_are_the_fits_one_by_one(form):
    curves = [curve_of(BENT, WIDE, noise=0.003, seed=seed) for seed in range(6)]
    one_by_one = [fit_curve(curve, form) for curve in curves]
    losses = np.array([fit.log_losses for fit in one_by_one])
    at_once = fit_many(one_by_one[0].log_compute, losses, one_by_one[0].free)
    for index, fit in enumerate(one_by_one):
        assert at_once.scales[index] == pytest.approx(fit.scale, rel=1e-2)
        assert at_once.residuals[index] == pytest.approx(fit.residuals, abs=2e-5)


def test_fits_are_deterministic():
    curve = curve_of(BENT, WIDE, noise=0.01)
    assert fit_curve(curve, Form.OFFSET) == fit_curve(curve, Form.OFFSET)


def test_an_offset_needs_a_point_more_than_constants():
    curve = curve_of(BENT, WIDE[:3])
    assert fit_curve(curve, Form.POWER).law.exponent > 0
    with pytest.raises(InputError, match=r"--form offset: curve baseline has 3 points, and 4 are"):
        fit_curve(curve, Form.OFFSET)


def test_losses_that_rise_are_no_law():
    with pytest.raises(InputError, match="curve baseline do not fall with compute"):
        fit_curve(curve_of(PowerLaw(2.0, -0.05)), Form.POWER)


def test_a_curve_too_steep_for_numbers_is_named():
    points = points_of("baseline", PowerLaw(1.0, 1.0), (1e8, 1.2e8, 1.3e8))
    steep = [replace(point, loss=10.0 ** (3 - 4 * i)) for i, point in enumerate(points)]
    with pytest.raises(InputError, match="is too steep for a power law"):
        fit_curve(curves_of(steep)[0], Form.POWER)
