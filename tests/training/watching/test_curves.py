"""What is drawn of a run: every iteration, or medians of many, and alarms where they belong."""

import json
import math
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from megatron_attnres.training.watching.curves import (
    MARKERS,
    Curves,
    Point,
    alarm_points,
    draw_curves,
    read_curves,
    short_number,
    thinned,
)
from megatron_attnres.training.watching.events import ALARMS
from megatron_attnres.training.watching.run_contents import read_run
from megatron_attnres.training.watching.run_folder import RunFolder
from tests.training.watching.test_run_state import event, make_run, metrics

POINTS = [Point(10.0, 3.0), Point(20.0, 2.0), Point(30.0, math.nan), Point(40.0, 1.0)]


def happened(*pairs):
    return [event(kind, iteration=iteration) for kind, iteration in pairs]


@pytest.mark.parametrize(
    ("events", "points"),
    [
        ([("loss spike", 2)], {"loss spike": POINTS[1:2]}),
        ([("skipped", 3)], {"skipped": POINTS[1:2]}),  # its own loss is no number
        ([("failure", 9)], {"failure": POINTS[3:]}),  # of an iteration that never ended
        ([("failure", 0), ("start", 1), ("end", 4)], {}),
        # Done again after a failure; the alarm comes again if it must.
        ([("straggler", 2), ("failure", 2), ("start", 1)], {"failure": POINTS[1:2]}),
        ([("straggler", 1), ("start", 1)], {"straggler": POINTS[:1]}),
        ([("straggler", 2), ("failure", 2), ("start", 0)], {}),
    ],
)
def test_alarms_lie_where_the_curve_shows_them(events, points):
    assert alarm_points(happened(*events), [1, 2, 3, 4], POINTS) == points


def test_every_alarm_has_a_marker():
    assert MARKERS.keys() == set(ALARMS)


numbers = st.floats(-100, 100) | st.just(math.nan)


@given(st.lists(st.tuples(st.floats(0, 1e6), numbers), max_size=60), st.integers(1, 70))
def test_thinned_curves_are_short_and_keep_to_their_values(pairs, most):
    tokens, values = [one for one, _ in pairs], [one for _, one in pairs]
    fewer, medians = thinned(tokens, values, most)
    assert len(fewer) == len(medians) <= most
    assert len(pairs) <= most * math.ceil(len(pairs) / most)
    finite = [value for value in values if not math.isnan(value)]
    for value in medians:
        assert math.isnan(value) or min(finite) <= value <= max(finite)
    if len(pairs) <= most:
        assert fewer == tokens
    if most == 1 and finite:
        assert medians == [median(finite)]


def test_a_run_is_read_without_what_is_no_number(tmp_path):
    path = make_run(tmp_path, 0, happened(("skipped", 2)))
    lines = [
        metrics(1, validation_loss=9.0),
        metrics(2, lm_loss=math.nan, grad_norm=math.inf),
        {"iteration": 3},
        metrics(4, grad_norm=0.0),
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    RunFolder(path).metrics.write_text(text + text[:50])
    curves = read_curves("a", read_run(path))
    assert curves.tokens == pytest.approx([1000, 2000, math.nan, 4000], nan_ok=True)
    assert curves.losses == pytest.approx([10, math.nan, math.nan, 2.5], nan_ok=True)
    assert curves.grad_norms == pytest.approx([1.5, math.nan, math.nan, math.nan], nan_ok=True)
    assert curves.speeds == pytest.approx([2000, 2000, math.nan, 2000], nan_ok=True)
    assert curves.validations == [Point(1000, 9)]
    assert curves.alarms == {"skipped": [Point(1000, 10)]}


def curves(name, count, loss=2.0, norm=1.0):
    tokens = [1e6 * index for index in range(count)]
    alarms = {kind: [Point(0, loss)] for kind in MARKERS} if count else {}
    return Curves(
        name, tokens, [loss] * count, [norm] * count, [5.0] * count, [Point(0, loss)], alarms
    )


def test_any_runs_can_be_drawn(tmp_path, recwarn):
    runs = [
        curves("usual", 300),
        curves("long", 1000),
        curves("one", 1),
        curves("none", 0),
        curves("no norms", 2, norm=math.nan),
        curves("lost", 500, loss=math.nan, norm=math.nan),
        *(curves(f"_$^{index}$", 2) for index in range(20)),
    ]
    draw_curves(runs, tmp_path / "all.png")
    assert imread(tmp_path / "all.png").shape[:2] == (1080, 1320)
    for alone in runs[2:6]:
        draw_curves([alone], tmp_path / f"{alone.name}.png")
    assert not recwarn.list


def test_numbers_of_tokens_are_short():
    numbers = (0, 999, 1500, 2.5e6, 1e9, 3e12)
    assert [short_number(one) for one in numbers] == ["0", "999", "1.5K", "2.5M", "1B", "3T"]
