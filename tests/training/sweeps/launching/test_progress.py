"""One view over all runs of a sweep."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.training.sweeps.launching.progress import (
    remaining_seconds,
    running_line,
    sweep_as_dict,
    sweep_lines,
    totals_line,
)
from megatron_attnres.training.sweeps.launching.progress_view import ProgressView
from megatron_attnres.training.sweeps.launching.standing import STANDING_WORDS, Standing
from megatron_attnres.training.watching.run_contents import RunContents
from megatron_attnres.training.watching.run_folder import RunFolder
from megatron_attnres.training.watching.run_state import state_of
from tests.training.sweeps.example_runs import ITERATIONS, planned
from tests.training.watching.test_run_state import NOW, metrics


def standing(name, word, iteration=0, validation=None, flops=10**9, **facts) -> Standing:
    lines = [metrics(iteration)] if iteration else []
    validated = metrics(iteration, validation_loss=validation) if validation else None
    seen = RunContents(RunFolder(Path(name)), lines, validated)
    return Standing(planned(name, flops=flops), word, state_of(name, seen, NOW), **facts)


ALL = [
    standing("a", "finished", ITERATIONS, validation=2.5, flops=2 * 10**9),
    standing("b", "running", 4),
    standing("c", "waiting"),
    standing("d", "failed", 1, error="--lr 0: no"),
    standing("e", "interrupted", 5, ended_by="ended by SIGKILL"),
]


def test_the_table_has_a_line_per_run_then_totals_then_errors():
    lines = list(sweep_lines(ALL))
    assert [line.split()[:2] for line in lines[:6]] == [
        ["run", "standing"],
        *([one.run.name, one.word] for one in ALL),
    ]
    assert lines[1].split()[2:] == ["10", "/", "10", "2,000", "1.0000", "2.5000", "-"]
    # Six iterations of half a second.
    assert lines[2].endswith("3 s")
    assert lines[7].startswith("5 runs: 1 finished, 1 running, 1 waiting, 1 interrupted, 1 failed")
    assert lines[8:] == [
        "failed: d: --lr 0: no",
        "interrupted: e: ended by SIGKILL after iteration 5 of 10",
    ]


def test_totals_count_flops_and_not_runs():
    # Of 6e9 FLOPs: 2e9, and 0.4 + 0.1 + 0.5 of 1e9 each.
    assert "; 50.0% of FLOPs done" in totals_line(ALL)
    # Left, without the failed run: 0.6 + 1 + 0.5 of 1e9, at 1e8 per half a second.
    assert remaining_seconds(ALL) == pytest.approx(2.1e9 / 2e8)


def test_what_was_dropped_is_no_work():
    dropped = standing("f", "dropped", 1, flops=10**12)
    assert remaining_seconds([*ALL, dropped]) == remaining_seconds(ALL)
    assert "1 dropped; 50.0% of FLOPs done" in totals_line([*ALL, dropped])


def test_nothing_that_runs_is_no_speed():
    assert remaining_seconds(ALL[:1]) is None
    assert totals_line(ALL[:1]) == "1 run: 1 finished; 100.0% of FLOPs done"


@pytest.mark.parametrize("seconds", [-0.5, 0.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_no_speed(seconds):
    seen = RunContents(RunFolder(Path("b")), [metrics(4, step_seconds=seconds)])
    one = Standing(planned("b"), "running", state_of("b", seen, NOW))
    assert remaining_seconds([one]) is None
    assert sweep_as_dict([one])["runs"][0]["remaining_seconds"] is None


def test_two_that_run_share_what_is_left():
    two = [standing("b", "running", 5), standing("c", "running", 5)]
    assert remaining_seconds(two) == pytest.approx(2.5)


def test_the_line_that_is_redrawn_names_what_runs():
    assert running_line(ALL) == "1/5 runs | 50% of FLOPs | about 10 s left | b 4/10 loss 2.500"


def test_json_says_the_same():
    content = sweep_as_dict(ALL)
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert [one["standing"] for one in content["runs"]] == [one.word for one in ALL]
    assert content["runs"][0]["validation_loss"] == 2.5
    assert content["runs"][3]["error"] == "--lr 0: no"
    assert content["totals"]["finished"] == 1
    assert content["totals"]["share_of_flops_done"] == 0.5


def test_a_loss_that_is_not_finite_is_none_in_json_and_named_in_the_table():
    lost = [standing("a", "finished", ITERATIONS, validation=float("nan"))]
    assert sweep_as_dict(lost)["runs"][0]["validation_loss"] is None
    assert " nan " in list(sweep_lines(lost))[1]


@given(st.lists(st.tuples(st.sampled_from(STANDING_WORDS), st.integers(0, ITERATIONS)), min_size=1))
def test_counts_add_up(facts):
    standings = [standing(f"r{n}", *fact) for n, fact in enumerate(facts)]
    totals = sweep_as_dict(standings)["totals"]
    assert sum(totals[word] for word in STANDING_WORDS) == totals["runs"] == len(facts)
    assert 0 <= totals["share_of_flops_done"] <= 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_events_and_nothing_that_is_redrawn():
    output = io.StringIO()
    view = ProgressView(output)
    assert not view.is_due()
    view.say("event")
    view.close()
    assert output.getvalue() == "event\n"


def test_a_terminal_gets_one_line_that_makes_way_for_events():
    output = Terminal()
    view = ProgressView(output)
    assert view.is_due()
    view.show("x" * 1000)
    assert not view.is_due()
    view.say("event")
    assert view.is_due()
    first, event, *rest = output.getvalue().split("\r\x1b[K")[1:]
    assert set(first) == {"x"}
    assert len(first) < 1000
    assert (event, rest) == ("event\n", [])
