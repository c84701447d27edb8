"""Points that cannot be fitted are named; seeds of a size count once."""

import math
from dataclasses import replace

import pytest

from megatron_attnres.analysis.scaling_laws.measurements.points import curves_of
from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.planning.budgets import FLOPS_PER_PFLOPS_DAY
from tests.analysis.scaling_laws.synthetic import PAPER, points_of

LAW = PAPER["baseline"]


def test_seeds_of_a_size_are_one_mean():
    points = points_of("baseline", LAW, seeds=2)
    points[0], points[1] = replace(points[0], loss=2.0), replace(points[1], loss=2.42)
    curve = curves_of(points)[0]
    assert len(curve.points) == 10
    assert [mean.runs for mean in curve.means] == [2] * 5
    assert curve.means[0].loss == pytest.approx(2.2)
    # One pair differs, of five degrees of freedom.
    assert curve.seed_spread == pytest.approx(math.log(1.21) / math.sqrt(2) / math.sqrt(5))


def test_without_a_second_seed_their_spread_is_not_known():
    assert curves_of(points_of("baseline", LAW))[0].seed_spread is None


def test_curves_keep_their_order_and_sizes_are_sorted():
    points = points_of("full", LAW, (3, 1, 2)) + points_of("baseline", LAW)
    curves = curves_of(points)
    assert [curve.name for curve in curves] == ["full", "baseline"]
    assert [mean.compute for mean in curves[0].means] == pytest.approx([1, 2, 3])
    assert (curves[0].smallest, curves[0].largest) == pytest.approx((1, 3))


def changed(index, **changes):
    points = points_of("baseline", LAW)
    points[index] = replace(points[index], **changes)
    return points


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "no runs"),
        (changed(1, loss=math.nan), "baseline-s1-seed1: its loss is nan"),
        (changed(1, loss=math.inf), "baseline-s1-seed1: its loss is inf"),
        (changed(1, loss=1e-30), "baseline-s1-seed1: its loss is 1e-30, which is none in nats"),
        (changed(1, flops=0.0), "baseline-s1-seed1: its compute is 0"),
        (points_of("baseline", LAW) * 2, "baseline-s0-seed1 and baseline-s0-seed1: both are"),
        (
            [*points_of("baseline", LAW), *changed(0, flops=0.70049 * FLOPS_PER_PFLOPS_DAY)],
            "baseline-s0-seed1 and baseline-s0-seed1: both are",
        ),
        (points_of("baseline", LAW, (2.0,)), "single size s0"),
        (points_of("baseline", LAW, (2.0, 2.0)), "all sizes of curve baseline have about"),
        (points_of("baseline", LAW, (2.0, 2.01, 2.02)), "too near each other for a slope"),
        (points_of("baseline", LAW, (1e-8, 5e3)), "baseline-s0-seed1 and baseline-s1-seed1: .*mix"),
    ],
)
def test_what_cannot_be_fitted_is_named(points, message):
    with pytest.raises(InputError, match=message):
        curves_of(points)
