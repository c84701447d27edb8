"""Alarms: a course that is left raises one, and nothing else does."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.training.watching.alarms import Alarm, AlarmConfig, Alarms

CONFIG = AlarmConfig(window=40, loss_deviations=6.0, grad_norm_ratio=10.0)
STEPS = 100
NOT_FINITE = (math.nan, math.inf, -math.inf)


def falling(seed: int) -> list[float]:
    """A loss from 10 to 5 with noise of one percent."""
    noise = np.random.default_rng(seed).normal(1.0, 0.01, STEPS)
    return [(3 + 7 * math.exp(-step / STEPS)) * factor for step, factor in enumerate(noise)]


def noisy_norms(seed: int) -> list[float]:
    return list(np.random.default_rng(seed).lognormal(0.0, 0.5, STEPS))


def alarms_of(
    losses: list[float], norms: list[float] | None = None, config: AlarmConfig = CONFIG
) -> list[list[Alarm]]:
    """Of every iteration."""
    alarms = Alarms(config)
    pairs = zip(losses, norms or [1.0] * len(losses), strict=True)
    return [alarms.look(iteration, *pair) for iteration, pair in enumerate(pairs, 1)]


def kinds(found: list[list[Alarm]]) -> list[tuple[int, str]]:
    """What was raised, and in which iteration."""
    return [(iteration, one.kind) for iteration, some in enumerate(found, 1) for one in some]


seeds = st.integers(0, 2**32 - 1)
places = st.integers(20, STEPS - 1)


@given(seeds)
def test_a_falling_noisy_loss_raises_none(seed):
    assert kinds(alarms_of(falling(seed), noisy_norms(seed))) == []


@given(seeds, places)
def test_a_spike_raises_one_and_what_follows_does_not(seed, at):
    losses = falling(seed)
    losses[at] *= 2
    assert kinds(alarms_of(losses)) == [(at + 1, "loss spike")]


@given(seeds, places, st.floats(1.05, 100.0))
def test_a_norm_above_the_ratio_raises_one(seed, at, factor):
    norms = noisy_norms(seed)
    norms[at] = CONFIG.grad_norm_ratio * factor * np.median(norms[max(0, at - CONFIG.window) : at])
    assert kinds(alarms_of(falling(seed), norms)) == [(at + 1, "gradient norm")]


@given(seeds, places, st.integers(-20, 20))
def test_the_scale_does_not_matter(seed, at, exponent):
    losses, norms = falling(seed), noisy_norms(seed)
    losses[at] *= 2
    norms[at] *= 15
    plain = kinds(alarms_of(losses, norms))
    # Powers of two scale without rounding.
    scaled = [[math.ldexp(one, exponent) for one in some] for some in (losses, norms)]
    assert kinds(alarms_of(*scaled)) == plain
    assert (at + 1, "loss spike") in plain


@given(
    seeds, st.lists(st.tuples(st.integers(0, STEPS - 1), st.sampled_from(NOT_FINITE)), max_size=20)
)
def test_values_that_are_not_finite_are_as_if_they_had_not_been(seed, some):
    losses, norms = falling(seed), noisy_norms(seed)
    losses[80] *= 2
    norms[90] *= 1e3
    holes, others = list(losses), list(norms)
    for at, value in some:
        holes.insert(at, value)
        others.insert(at, value)
    wanted = [kind for _, kind in kinds(alarms_of(losses, norms))]
    assert [kind for _, kind in kinds(alarms_of(holes, others))] == wanted
    assert wanted[-2:] == ["loss spike", "gradient norm"]


@given(seeds)
def test_no_limit_is_no_alarm(seed):
    losses, norms = falling(seed), noisy_norms(seed)
    losses[80], norms[80] = 1e6, 1e6
    silent = AlarmConfig(window=40, loss_deviations=0.0, grad_norm_ratio=0.0)
    assert kinds(alarms_of(losses, norms, silent)) == []


@pytest.mark.parametrize("fewest", [9, 10])
def test_there_is_no_course_before_ten_iterations(fewest):
    losses = [4.0] * fewest + [40.0]
    assert bool(kinds(alarms_of(losses))) == (fewest == 10)


@pytest.mark.parametrize("window", [1, 3, 9])
def test_a_smaller_window_is_a_course_once_it_is_full(window):
    config = AlarmConfig(window, loss_deviations=6.0, grad_norm_ratio=10.0)
    found = alarms_of([4.0] * window + [40.0], [1.0] * window + [11.0], config)
    assert kinds(found) == [(window + 1, "loss spike"), (window + 1, "gradient norm")]


def test_a_flat_loss_may_move_a_little():
    flat = [4.0] * 20
    assert kinds(alarms_of([*flat, 4.1])) == []
    assert kinds(alarms_of([*flat, 4.2])) == [(21, "loss spike")]


def test_a_course_of_zeros_is_one():
    assert kinds(alarms_of([0.0] * 20 + [0.0], [0.0] * 20 + [1.0])) == [(21, "gradient norm")]


def test_what_an_alarm_says():
    [*_, (loss, norm)] = alarms_of([4.0] * 20 + [5.0], [0.5] * 20 + [8.0])
    assert loss.message == (
        "iteration 21: loss 5.0000 is 50.0 standard deviations above 4.0000, the median of 20 "
        "iterations"
    )
    assert norm.message == (
        "iteration 21: gradient norm 8 is 16.0 times 0.5, the median of 20 iterations"
    )
