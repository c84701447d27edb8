"""Compute advantages: the paper's figure, their mean over a range, and what pairs of runs tell."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.analysis.scaling_laws.fits.advantage import (
    advantage_of,
    common_range,
    compute_factor,
    factor_over,
    spread_over,
)
from megatron_attnres.analysis.scaling_laws.fits.fitting import fit_curve
from megatron_attnres.analysis.scaling_laws.fits.power_law import Form, PowerLaw
from megatron_attnres.analysis.scaling_laws.measurements.points import curves_of
from tests.analysis.scaling_laws.synthetic import COMPUTES, PAPER, points_of

BASELINE, BLOCK = PAPER["baseline"], PAPER["block4"]


def test_the_papers_fits_give_the_papers_advantage():
    assert round(compute_factor(BASELINE, BLOCK, 5.6), 2) == 1.25
    assert round(factor_over(BASELINE, BLOCK, [5.6]), 2) == 1.25


@given(st.floats(0.5, 2), st.floats(0.03, 0.3), st.floats(-8, 2).map(lambda power: 10**power))
def test_a_law_shifted_by_a_factor_has_it_as_its_advantage(factor, exponent, compute):
    shifted = PowerLaw(2.0 * factor**-exponent, exponent)
    assert compute_factor(PowerLaw(2.0, exponent), shifted, compute) == pytest.approx(factor)


def test_over_a_range_it_is_the_geometric_mean():
    computes = spread_over(0.7, 5.8)
    factors = [compute_factor(BASELINE, BLOCK, compute) for compute in computes]
    mean = math.exp(sum(map(math.log, factors)) / len(factors))
    assert factor_over(BASELINE, BLOCK, computes) == pytest.approx(mean)
    assert min(factors) < mean < max(factors)


def test_a_reference_that_never_gets_there_is_infinitely_behind():
    stuck = PowerLaw(0.5, 0.1, 1.8)
    assert compute_factor(stuck, BASELINE, 5.6) == math.inf
    assert factor_over(stuck, BASELINE, [5.6]) == math.inf


def test_ranges_in_common():
    assert common_range((1, 5), (2, 9)) == (2, 5)
    low, high = common_range((1, 2), (3, 4))
    assert low > high


def fits(shared, names=("s", "s"), seed=3):
    """Both curves with the same noise, or each with its own."""
    found = []
    for index, law in enumerate(PAPER.values()):
        points = points_of("c", law, noise=0.005, seed=seed if shared else seed + index)
        renamed = [
            type(point)(**(vars(point) | {"size": names[index] + point.size})) for point in points
        ]
        found.append(fit_curve(curves_of(renamed)[0], Form.POWER))
    return found


def width(pair):
    interval = advantage_of(*pair, COMPUTES, 400, 1).interval
    return interval.high - interval.low


def test_noise_that_curves_of_the_same_sizes_share_does_not_blur_their_difference():
    assert 3 * width(fits(shared=True)) < width(fits(shared=True, names=("a", "b")))


def test_the_interval_holds_the_estimate():
    found = advantage_of(*fits(shared=False), [5.6], 400, 1)
    assert found.interval.holds(found.factor)


def test_without_spare_points_there_is_no_interval():
    pair = [
        fit_curve(curves_of(points_of("c", law, (1.0, 3.0)))[0], Form.POWER)
        for law in PAPER.values()
    ]
    found = advantage_of(*pair, [2.0], 400, 1)
    assert found.factor == pytest.approx(compute_factor(BASELINE, BLOCK, 2.0))
    assert not math.isfinite(found.interval.high)
