"""What is done about each iteration: one rank writes, all give up together."""

from types import SimpleNamespace

import pytest

from megatron_attnres.errors import TrainingGaveUp
from megatron_attnres.training.course import Course
from megatron_attnres.training.watching.alarms import AlarmConfig, Alarms
from megatron_attnres.training.watching.events import EventLog, read_events
from megatron_attnres.training.watching.stragglers import StragglerConfig, Stragglers

HOSTS = ["a", "a", "b", "b"]


def course(events: EventLog | None, max_skipped_steps: int = 2) -> Course:
    return Course(
        max_skipped_steps,
        Alarms(AlarmConfig(window=10, loss_deviations=6.0, grad_norm_ratio=10.0)),
        Stragglers(StragglerConfig(interval=4, ratio=1.5), num_stages=2),
        HOSTS,
        events,
    )


def result(
    iteration: int,
    skipped: bool = False,
    loss: float = 4.0,
    compute: tuple[float, ...] = (1.0,) * 4,
) -> SimpleNamespace:
    """Of an iteration that is all right but for what is said."""
    metrics = SimpleNamespace(
        iteration=iteration,
        lm_loss=loss,
        grad_norm=1.0,
        update_skipped=skipped,
        skipped_steps=9,
    )
    figures = [SimpleNamespace(compute_seconds=seconds) for seconds in compute]
    return SimpleNamespace(
        metrics=metrics, figures=figures, why_skipped="rank 3" if skipped else None
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def kinds(path) -> list[tuple[str, int]]:
    return [(event["kind"], event["iteration"]) for event in read_events(path)]


@pytest.mark.parametrize("is_writer", [True, False])
def test_all_ranks_give_up_after_the_same_iteration(path, is_writer):
    some = course(EventLog(path) if is_writer else None)
    for iteration, skipped in enumerate([True, True, False, True, True], 1):
        some.look(result(iteration, skipped))
    with pytest.raises(TrainingGaveUp) as caught:
        some.look(result(6, skipped=True))
    assert str(caught.value) == (
        "--max-skipped-steps 2: 3 updates in a row were skipped; last: rank 3"
    )
    wanted = [("skipped", iteration) for iteration in (1, 2, 4, 5, 6)] + [("gave up", 6)]
    assert kinds(path) == (wanted if is_writer else [])


def test_none_may_be_skipped():
    with pytest.raises(TrainingGaveUp, match="1 updates in a row"):
        course(None, max_skipped_steps=0).look(result(1, skipped=True))


def test_a_skipped_update_says_why_and_how_many(path):
    course(EventLog(path)).look(result(5, skipped=True))
    [event] = read_events(path)
    assert event["message"] == "iteration 5: no update, 1 in a row, 9 in all: rank 3"


def test_alarms_are_raised_but_for_updates_that_were_skipped(path):
    some = course(EventLog(path), max_skipped_steps=99)
    for iteration in range(1, 12):
        some.look(result(iteration))
    some.look(result(12, skipped=True, loss=float("nan")))
    some.look(result(13, loss=40.0))
    assert kinds(path) == [("skipped", 12), ("loss spike", 13)]


def test_a_slow_rank_is_named_with_its_host(path):
    some = course(EventLog(path))
    for iteration in range(1, 5):
        some.look(result(iteration, compute=(1.0, 1.0, 0.5, 1.0)))
    [event] = read_events(path)
    assert (event["kind"], event["iteration"]) == ("straggler", 4)
    assert (event["rank"], event["host"], event["ratio"]) == (3, "b", 2.0)
    assert event["message"].endswith(
        "rank 3 on b computes 1000.0 ms a step, 2.00 times the fastest of stage 1 (500.0 ms)"
    )


def test_other_ranks_write_nothing(capsys):
    some = course(None)
    for iteration in range(1, 20):
        some.look(result(iteration, loss=4.0 if iteration < 15 else 40.0))
    assert capsys.readouterr() == ("", "")
