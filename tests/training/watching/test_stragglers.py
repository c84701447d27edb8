"""Slow ranks are named: those of one stage against each other, a lone one against its own best."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.training.watching.stragglers import Straggler, StragglerConfig, Stragglers

seconds = st.floats(0.01, 10.0)


def watching(interval: int = 3, ratio: float = 1.5, stages: int = 2) -> Stragglers:
    return Stragglers(StragglerConfig(interval, ratio), stages)


def interval_of(stragglers: Stragglers, compute: list[float], steps: int = 3) -> list[Straggler]:
    """What the last of some equal steps says; the others must say nothing."""
    found = [stragglers.look(compute) for _ in range(steps)]
    assert not any(found[:-1])
    return found[-1]


@given(
    st.integers(1, 4), st.integers(2, 8), seconds, st.floats(1.51, 50.0), st.randoms(), st.data()
)
def test_the_slow_rank_is_named(stages, per_stage, usual, factor, random, data):
    compute = [usual * random.uniform(1.0, 1.2) for _ in range(stages * per_stage)]
    slow = data.draw(st.integers(0, len(compute) - 1))
    stage = slow // per_stage
    others = compute[stage * per_stage : (stage + 1) * per_stage]
    del others[slow % per_stage]
    compute[slow] = min(others) * factor
    [found] = interval_of(watching(stages=stages), compute)
    assert (found.rank, found.stage) == (slow, stage)
    assert found.fastest == min(others)
    assert found.ratio == pytest.approx(factor)


@given(st.lists(seconds, min_size=4, max_size=4), st.integers(-20, 20))
def test_the_scale_does_not_matter(compute, exponent):
    def ranks(some: list[float]) -> list[int]:
        return [one.rank for one in interval_of(watching(), some)]

    assert ranks(compute) == ranks([one * 2.0**exponent for one in compute])


@given(seconds, seconds)
def test_stages_are_not_compared_with_each_other(first, second):
    assert interval_of(watching(), [first, first, second, second]) == []


def test_the_slowest_comes_first():
    found = interval_of(watching(stages=1), [1.0, 2.0, 4.0, 3.0])
    assert [one.rank for one in found] == [2, 3, 1]


def test_a_rank_without_equals_is_compared_with_its_own_best():
    alone = watching(stages=2)
    assert interval_of(alone, [1.0, 4.0]) == []
    assert interval_of(alone, [1.4, 4.0]) == []
    assert interval_of(alone, [1.6, 3.0]) == [Straggler(0, 0, 1.6, 1.0)]
    assert interval_of(alone, [1.0, 4.6]) == [Straggler(1, 1, 4.6, 3.0)]


def test_one_slow_step_of_an_interval_is_nobody_s_fault():
    stragglers = watching(interval=5, stages=1)
    found = [stragglers.look([1.0, 100.0 if step == 2 else 1.0]) for step in range(5)]
    assert not any(found)


@pytest.mark.parametrize(("slow", "is_named"), [(1.5, False), (1.500001, True)])
def test_the_ratio_itself_is_allowed(slow, is_named):
    assert bool(interval_of(watching(stages=1), [1.0, slow])) == is_named


def test_an_interval_of_one_reports_at_once():
    stragglers = watching(interval=1, stages=1)
    assert [bool(stragglers.look(some)) for some in ([1.0, 2.0], [1.0, 1.0], [2.0, 1.0])] == [
        True,
        False,
        True,
    ]


def test_an_interval_of_zero_never_reports():
    stragglers = watching(interval=0, stages=1)
    assert not any(stragglers.look([1.0, 100.0]) for _ in range(300))


def test_a_rank_that_computes_nothing_is_no_measure():
    assert interval_of(watching(stages=1), [0.0, 1.0]) == []
