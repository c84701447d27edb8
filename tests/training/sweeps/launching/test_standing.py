"""What a run's folder, its starts and the queue say of how it stands."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.training.sweeps.launching.launches import Launch
from megatron_attnres.training.sweeps.launching.standing import (
    CRASHES,
    QUEUE_RUNNING,
    STANDING_WORDS,
    Evidence,
    Standing,
    standing_of,
    with_dropped,
)
from megatron_attnres.training.watching.run_contents import RunContents
from megatron_attnres.training.watching.run_folder import RunFolder
from tests.training.sweeps.example_runs import ITERATIONS, planned
from tests.training.watching.test_run_state import NOW, event, metrics, record

FOLDER = RunFolder(Path("nowhere"))
LAST = metrics(ITERATIONS, validation_loss=2.5)
BEGIN = NOW - 100


def contents(iteration: int = 0, events=(), validation=None, **others) -> RunContents:
    lines = [metrics(iteration)] if iteration else []
    return RunContents(FOLDER, lines, validation, events, **others)


def ended(status: int | None, begin: float = BEGIN) -> Launch:
    return Launch(begin, "log.txt", 0, "here", 7, status=status)


def standing(seen: RunContents, *launches: Launch, **evidence) -> Standing:
    return standing_of(planned("one"), Evidence(seen, launches, host="here", **evidence), NOW)


def test_a_run_that_nobody_started_waits():
    assert standing(contents()).word == "waiting"


def test_finished_is_all_iterations_and_the_validation_loss_of_the_last():
    found = standing(contents(ITERATIONS, validation=LAST), ended(0))
    assert (found.word, found.error, found.flops_done) == ("finished", None, 10**9)


def test_a_run_that_was_trained_by_hand_is_finished_as_well():
    assert standing(contents(ITERATIONS, validation=LAST)).word == "finished"


def test_a_run_that_is_not_to_validate_is_finished_without():
    run = replace(planned("one"), flags={"train-iters": ITERATIONS})
    assert standing_of(run, Evidence(contents(ITERATIONS)), NOW).word == "finished"


def test_all_iterations_without_a_validation_loss_are_a_failure():
    found = standing(contents(ITERATIONS), ended(0))
    assert found.word == "failed"
    assert "none has a validation loss" in found.error


def test_who_was_killed_between_the_last_save_and_its_metrics_has_lost_its_end():
    found = standing(contents(ITERATIONS - 1, checkpoint=ITERATIONS), ended(-9))
    assert (found.word, found.lost_its_end) == ("interrupted", True)
    assert not standing(contents(5, checkpoint=4), ended(-9)).lost_its_end


def test_a_run_runs_while_its_lock_is_held_whatever_else_is_said():
    assert standing(contents(), is_held=True).word == "running"
    assert standing(contents(ITERATIONS, validation=LAST), is_held=True).word == "running"
    assert standing(contents(5), ended(1), is_held=True).word == "running"


def test_heartbeats_of_killed_ranks_are_not_believed_where_the_lock_is_free():
    alive = contents(5, [event("start", BEGIN)], records=[record(beat=NOW - 1)])
    assert standing(alive, ended(None)).word == "interrupted"
    assert standing(alive, ended(-9)).word == "interrupted"


@pytest.mark.parametrize(
    "launches",
    [(), [Launch(BEGIN, "log", host="elsewhere")], [Launch(BEGIN, "log", slurm_job="5_0")]],
    ids=["by hand", "another machine", "Slurm"],
)
def test_heartbeats_are_believed_where_there_is_no_lock_to_ask(launches):
    alive = contents(5, [event("start", BEGIN)], records=[record(beat=NOW - 1)])
    assert standing(alive, *launches).word == "running"


@pytest.mark.parametrize("status", [-9, -15, 137, 143])
def test_a_signal_from_outside_interrupts(status):
    seen = contents(5, [event("start", BEGIN + 1), event("failure", BEGIN + 9)])
    found = standing(seen, ended(status))
    number = -status if status < 0 else status - 128
    assert (found.word, found.error) == ("interrupted", None)
    assert found.ended_by == f"ended by {signal.Signals(number).name}"


@pytest.mark.parametrize("number", CRASHES)
def test_a_crash_is_the_run_s_own_fault(number):
    found = standing(contents(5), ended(-number))
    assert (found.word, found.error) == (
        "failed",
        f"crashed ({number.name}); see nowhere/log.txt",
    )


def test_a_run_that_saved_and_stopped_is_interrupted():
    seen = contents(5, [event("start", BEGIN + 1), event("stop", BEGIN + 9)])
    found = standing(seen, ended(0))
    assert (found.word, found.ended_by) == ("interrupted", "stopped in order")


def test_bad_input_is_told_by_the_line_that_complained():
    words = ["warning: slow", "/a b/pretrain_attnres.py: --lr 0: more is allowed"]
    found = standing(contents(), ended(2), last_words=words)
    assert (found.word, found.error) == ("failed", "--lr 0: more is allowed")


def test_a_failure_is_told_by_its_report_in_one_line():
    report = "training failed in iteration 5\n  cause    rank 0: no memory\n  next     go on"
    events = [event("start", BEGIN + 1), event("failure", BEGIN + 9, message=report)]
    found = standing(contents(5, events), ended(1), last_words=["rank 0 failed (1)"])
    assert (found.word, found.error) == (
        "failed",
        "training failed in iteration 5; cause rank 0: no memory",
    )


def test_a_run_that_gave_up_has_failed():
    events = [event("start", BEGIN + 1), event("gave up", BEGIN + 9, message="11 skipped")]
    found = standing(contents(5, events), ended(3), last_words=["x"])
    assert (found.word, found.error) == ("failed", "11 skipped")


@pytest.mark.parametrize("status", [3, None])
def test_a_run_that_gave_up_at_its_last_iteration_has_failed(status):
    events = [event("start", BEGIN + 1), event("gave up", BEGIN + 9, message="11 skipped")]
    found = standing(contents(ITERATIONS, events, validation=LAST), ended(status), last_words=["x"])
    assert (found.word, found.error) == ("failed", "11 skipped")


def test_what_the_grid_no_longer_has_is_dropped_unless_it_finished():
    finished = standing(contents(ITERATIONS, validation=LAST), ended(0))
    assert with_dropped([finished], {"one"}) == [finished]
    for left in (
        standing(contents()),
        standing(contents(5), ended(-9)),
        standing(contents(), ended(2)),
    ):
        assert [one.word for one in with_dropped([left], {"one"})] == ["dropped"]
        assert with_dropped([left], {"another"}) == [left]


def test_an_exception_without_a_report_is_told_by_its_last_line():
    found = standing(contents(), ended(1), last_words=["Traceback", "ImportError: no torch"])
    assert found.error == "ImportError: no torch"
    assert standing(contents(), ended(1)).error == "ended with status 1 and said nothing"


def test_without_a_status_the_run_s_own_word_counts():
    failure = event("failure", BEGIN + 9, message="no memory")
    found = standing(contents(5, [event("start", BEGIN + 1), failure]), ended(None))
    assert (found.word, found.error) == ("failed", "no memory")
    found = standing(contents(5, [event("start", BEGIN + 1)]), ended(None))
    assert (found.word, found.ended_by) == ("interrupted", "lost")


def test_an_earlier_start_s_failure_is_not_the_newest_one_s():
    earlier = [event("start", BEGIN - 50), event("failure", BEGIN - 40)]
    assert standing(contents(5, earlier), ended(1, BEGIN - 60), ended(None)).word == "interrupted"
    assert standing(contents(5, earlier), ended(1, BEGIN - 60), ended(-15)).word == "interrupted"


@pytest.mark.parametrize("state", QUEUE_RUNNING)
def test_slurm_s_word_that_a_job_runs_is_believed(state):
    assert standing(contents(), queue_state=state).word == "running"


def test_who_is_in_the_queue_waits_also_between_two_starts():
    launch = Launch(BEGIN, "log", slurm_job="5_0")
    assert standing(contents(), launch, queue_state="PENDING").word == "waiting"
    seen = contents(5, [event("start", BEGIN + 1), event("failure", BEGIN + 9)])
    assert standing(seen, launch, queue_state="PENDING").word == "waiting"


def test_a_batch_job_that_was_not_requeued_has_failed():
    launch = Launch(BEGIN, "../slurm-5_0.log", slurm_job="5_0")
    words = [
        "/x/pretrain_attnres.py: --lr 0: more is allowed",
        "srun: error: n1: task 0: Exited with exit code 2",
        "[job] status 2: not requeued, somebody has to look",
    ]
    found = standing(contents(), launch, last_words=words)
    assert (found.word, found.error) == ("failed", "--lr 0: more is allowed")
    found = standing(contents(), launch, last_words=["[job] stopped in order, and ended by Slurm"])
    assert found.word == "interrupted"


MOMENTS = st.floats(NOW - 300, NOW)
EVENTS = st.builds(
    event, st.sampled_from(["start", "stop", "end", "failure", "gave up", "skipped"]), MOMENTS
)
LAUNCHES = st.builds(ended, st.none() | st.integers(-20, 150), MOMENTS)


@given(
    st.integers(0, ITERATIONS),
    st.lists(EVENTS, max_size=4),
    st.lists(LAUNCHES, max_size=3),
    st.booleans(),
    st.sampled_from([None, "PENDING", "RUNNING"]),
    st.lists(st.text(max_size=20), max_size=2),
)
def test_every_run_stands_somehow_and_only_a_failure_has_an_error(
    iteration, events, launches, is_held, queue_state, words
):
    found = standing(
        contents(iteration, events),
        *launches,
        is_held=is_held,
        queue_state=queue_state,
        last_words=words,
    )
    assert found.word in STANDING_WORDS
    assert (found.error is not None) == (found.word == "failed")
    assert (found.ended_by is not None) == (found.word == "interrupted")
    assert "\n" not in (found.error or "")
    assert 0 <= found.flops_done <= found.run.flops
