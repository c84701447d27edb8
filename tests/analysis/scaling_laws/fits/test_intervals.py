"""Intervals hold the truth as often as they claim. A longer table: tests/calibrate_intervals.py."""

import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from megatron_attnres.analysis.scaling_laws.fits.fitting import fit_curve
from megatron_attnres.analysis.scaling_laws.fits.intervals import UNBOUNDED, constant_intervals
from megatron_attnres.analysis.scaling_laws.fits.power_law import Form, PowerLaw
from megatron_attnres.analysis.scaling_laws.measurements.points import curves_of
from tests.analysis.scaling_laws.synthetic import PAPER, points_of
from tests.calibrate_intervals import Design, intervals_of_trial

TRIALS = 100
ENOUGH = 93


@pytest.mark.parametrize(
    "design",
    [Design(5, 1, 0.5, 40, Form.POWER), Design(6, 1, 0.01, 1000, Form.OFFSET)],
    ids=str,
)
def test_the_truth_is_in_93_of_100_intervals(design):
    hits: dict[str, int] = {}
    # A trial computes for a fraction of a second on one core, and knows nothing of the others.
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for found in pool.map(hits_of_trial, [design] * TRIALS, range(TRIALS), chunksize=5):
            for name, hit in found.items():
                hits[name] = hits.get(name, 0) + hit
    assert set(hits) == {*design.form.constants, "at", "range"}
    assert min(hits.values()) >= ENOUGH, hits


def hits_of_trial(design: Design, seed: int) -> dict[str, bool]:
    """Which intervals hold the truth. Runs in a process of its own."""
    found = intervals_of_trial(design, seed, 200)
    return {name: interval.holds(truth) for name, truth, interval in found}


def fitted(law=PAPER["baseline"], form=Form.POWER, **keys):
    return fit_curve(curves_of(points_of("baseline", law, **keys))[0], form)


def test_least_squares_would_claim_about_the_same():
    """Not wide for the sake of it: within a factor of Student's interval of the exponent."""
    from scipy import stats

    ratios = []
    for seed in range(12):
        fit = fitted(noise=0.01, seed=seed)
        interval = constant_intervals(fit, 400, 1)["exponent"]
        line = stats.linregress(fit.log_compute, fit.log_losses)
        student = 2 * stats.t.ppf(0.975, 3) * line.stderr
        ratios.append((interval.high - interval.low) / student)
    assert 0.9 < np.median(ratios) < 1.6


def test_intervals_shrink_with_the_noise_and_hold_the_estimate():
    wide, narrow = (constant_intervals(fitted(noise=noise), 400, 1) for noise in (0.01, 0.001))
    for name in Form.POWER.constants:
        assert wide[name].high - wide[name].low > 5 * (narrow[name].high - narrow[name].low)
        assert wide[name].holds(getattr(fitted(noise=0.01).law, name))


def test_an_offset_that_cannot_be_told_reaches_from_nothing_to_the_losses():
    interval = constant_intervals(fitted(form=Form.OFFSET, noise=0.01), 400, 1)["offset"]
    assert interval.low == 0
    assert interval.high > 1.0


def test_two_points_bound_nothing():
    fit = fitted(computes=(1.0, 3.0))
    assert constant_intervals(fit, 400, 1) == dict.fromkeys(Form.POWER.constants, UNBOUNDED)
    assert not math.isfinite(UNBOUNDED.low)


def test_exact_points_leave_no_doubt():
    found = constant_intervals(fitted(PowerLaw(1.9, 0.06)), 400, 1)["exponent"]
    assert found.low == pytest.approx(0.06, abs=1e-6)
    assert found.high == pytest.approx(0.06, abs=1e-6)


def test_the_seed_decides():
    fit = fitted(noise=0.01)
    assert constant_intervals(fit, 400, 1) == constant_intervals(fit, 400, 1)
    assert constant_intervals(fit, 400, 1) != constant_intervals(fit, 400, 2)
