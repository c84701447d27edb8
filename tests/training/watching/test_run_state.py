"""What a run's folder tells, also when half of it is missing, cut off or damaged."""

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.errors import InputError
from megatron_attnres.training.checkpoints.description import Description, TrainingState
from megatron_attnres.training.metrics import IterationMetrics
from megatron_attnres.training.watching.events import ALARMS, EventLog
from megatron_attnres.training.watching.rank_record import RankRecord, write_record
from megatron_attnres.training.watching.run_contents import WINDOW, RunContents, read_run
from megatron_attnres.training.watching.run_folder import RunFolder
from megatron_attnres.training.watching.run_report import (
    LAST_ALARMS,
    duration,
    run_lines,
    runs_table,
)
from megatron_attnres.training.watching.run_state import (
    ENDED,
    FRESH_SECONDS,
    names_of,
    state_of,
    state_word,
)

NOW = 1.8e9
ATTEMPT = "20270115T080000"
NOWHERE = RunFolder(Path("nowhere"))


def metrics(iteration, **changed):
    """Half a second a step: 200 ms compute, 50 ms waits, 10 ms gradients, 200 ms update."""
    values = {
        "iteration": iteration,
        "lm_loss": 10 / iteration,
        "grad_norm": 1.5,
        "learning_rate": 3e-4,
        "tokens": 1000 * iteration,
        "step_seconds": 0.5,
        "tokens_per_second": 2000.0,
        "tokens_per_second_per_rank": 500.0,
        "model_tflops_per_rank": 123.4,
        "p2p_bytes_forward": 1,
        "p2p_bytes_backward": 1,
        "peak_memory_bytes": 3 << 30,
        "peak_cached_sources": 1,
        "compute_seconds": 0.2,
        "p2p_wait_seconds": 0.05,
        "gradient_seconds": 0.01,
        "update_seconds": 0.2,
        "update_skipped": False,
        "skipped_steps": 2,
    }
    return IterationMetrics(**values | changed).as_dict()


def metrics_lines(count):
    """Validated every tenth iteration, the last one slow."""
    lines = []
    for iteration in range(1, count + 1):
        loss = {"validation_loss": 11 / iteration} if iteration % 10 == 0 else {}
        slow = {"step_seconds": 60.0, "tokens_per_second": 1.0} if iteration == count else {}
        lines.append(json.dumps(metrics(iteration, **loss, **slow)) + "\n")
    return lines


def record(rank=0, **changed):
    values = {"beat": NOW, "iteration": 1, "part": "saving", "since": NOW}
    return RankRecord(rank, "node", 1, **{"attempt": ATTEMPT} | values | changed)


def event(kind, at=NOW, **facts):
    return {"time": at, "kind": kind, "iteration": 3, "message": f"{kind}\nmore"} | facts


def make_run(path, iterations=0, events=(), records=()):
    folder = RunFolder(path)
    folder.make()
    if iterations:
        folder.metrics.write_text("".join(metrics_lines(iterations)))
    folder.events.write_text("".join(json.dumps(one) + "\n" for one in events))
    for one in records:
        write_record(folder.record(one.rank), one)
    return path


def make_checkpoint(path, iteration, train_iters):
    folder = RunFolder(path).checkpoints / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    state, configuration = TrainingState(iteration), {"loop": {"train_iters": train_iters}}
    Description(state, iteration, {}, {}, {}, "", {}, configuration, "").write(folder)
    return folder


def state_at(path, now=NOW):
    return state_of(path.name, read_run(path), now)


kinds = st.sampled_from(["start", *ENDED, *ALARMS])
moments = st.floats(NOW - 500, NOW + 10)
events = st.lists(st.tuples(kinds, moments).map(lambda one: event(*one)), max_size=6)
records = st.lists(
    st.builds(
        lambda state, beat: record(state=state, beat=beat),
        st.sampled_from(["running", "failed", "ended"]),
        moments,
    ),
    max_size=4,
)


@given(events, records, st.booleans(), st.booleans())
def test_a_run_runs_where_a_rank_is_alive_and_else_ended_as_it_said(
    events, records, has_report, has_iterations
):
    iterations = [metrics(1)] if has_iterations else []
    contents = RunContents(NOWHERE, iterations, None, events, records, has_report)
    word = state_word(contents, NOW)
    alive = [one for one in records if one.state == "running" and NOW - one.beat <= FRESH_SECONDS]
    assert (word == "running") == (bool(alive) and not has_report)
    said = [one for one in events if one["kind"] in ("start", *ENDED)]
    if word in ENDED.values():
        assert word == ENDED[said[-1]["kind"]]
    elif word == "not started":
        assert not said and not records and not iterations
    elif word == "silent" and said and said[-1]["kind"] in ENDED:
        # A later start is lost that had not said yet that it began.
        assert any(one.beat > said[-1]["time"] + FRESH_SECONDS for one in records)
    if not any(one["kind"] in ("failure", "gave up") for one in events):
        course = [one for one in events if one["kind"] not in ALARMS]
        assert state_word(replace(contents, events=course), NOW) == word


@pytest.mark.parametrize(
    ("kinds", "beat", "word"),
    [
        (["start"], NOW - 1, "running"),
        (["start"], NOW + 100, "running"),  # another host's clock
        (["start", "failure"], NOW - 1, "running"),  # started again, not yet said so
        (["start"], NOW - 61, "silent"),
        (["start", "failure", "start"], NOW - 61, "silent"),
        ([], NOW - 61, "silent"),
        (["start", "end"], NOW - 300, "finished"),
        (["start", "stop", "loss spike"], NOW - 300, "stopped"),
        (["start", "stop", "start", "failure"], NOW - 300, "failed"),
        (["start", "stop"], NOW - 100, "silent"),  # lost while it loaded
    ],
)
def test_states(kinds, beat, word):
    contents = RunContents(
        NOWHERE, [], None, [event(kind, NOW - 300) for kind in kinds], [record(beat=beat)]
    )
    assert state_word(contents, NOW) == word


def test_ranks_that_end_because_of_a_report_do_not_make_a_run_run(tmp_path):
    path = make_run(tmp_path, 1, [event("start"), event("failure")], [record(), record(1)])
    assert state_at(path).state == "running"
    RunFolder(path).report(ATTEMPT).touch()
    assert state_at(path).state == "failed"


def test_a_folder_is_summed_up(tmp_path):
    began = event("start", NOW - 90, train_iters=50)
    alarms = [event("straggler", NOW - 80, rank=index) for index in range(7)]
    ranks = [record(), record(1, beat=NOW - 70), record(2, attempt="20260101T000000", beat=5.0)]
    path = make_run(tmp_path / "name", 35, [began, *alarms], ranks)
    make_checkpoint(path, 20, 40)
    make_checkpoint(path, 30, 40)
    RunFolder(path).checkpoints.joinpath("iter_0000035.writing").mkdir()
    state = state_at(path)
    assert (state.name, state.state, state.ranks, state.silent_ranks) == ("name", "running", 2, [1])
    assert (state.iteration, state.train_iters, state.tokens) == (35, 50, 35_000)
    assert state.lm_loss == 10 / 35
    assert (state.validation_loss, state.validation_iteration) == (11 / 30, 30)
    assert (state.window, state.step_seconds, state.tokens_per_second) == (WINDOW, 0.5, 2000)
    assert (state.skipped_steps, state.mfu, state.peak_memory_bytes) == (2, None, 3 << 30)
    assert state.step_parts == pytest.approx(
        {
            "compute_seconds": 0.2,
            "p2p_wait_seconds": 0.05,
            "gradient_seconds": 0.01,
            "update_seconds": 0.2,
            "rest_seconds": 0.04,
        }
    )
    assert state.remaining_seconds == 15 * 0.5
    assert state.checkpoint_iteration == 30
    assert Path(state.checkpoint).is_dir()
    assert (state.starts, state.failures, state.quiet_seconds) == (1, 0, 0)
    assert [one["rank"] for one in state.alarms] == list(range(7))


def test_people_see_it(tmp_path):
    report = "training failed in iteration 4\n  cause    rank 3 on node\n  next     anew"
    happened = [
        event("start", NOW - 100, train_iters=5000),
        *(event("loss spike", NOW - 95 + index) for index in range(LAST_ALARMS)),
        event("failure", NOW - 90, message=report),
    ]
    path = make_run(tmp_path / "a", 25, happened)
    make_checkpoint(path, 20, 5000)
    lines = list(run_lines(state_at(path)))
    assert lines[0] == "a: failed, iteration 25 of 5,000, last heard of 1 min 30 s ago"
    text = "\n".join(lines)
    for part in (
        "loss  0.4000, validation 0.5500 after iteration 20, gradient norm 1.5\n",
        "2,000 tokens a second, 500 per rank, 123 TFLOP/s per rank, median of 20 iterations\n",
        "compute 200.0 ms (40%), p2p wait 50.0 ms (10%), gradients 10.0 ms (2%), "
        "update 200.0 ms (40%), rest 40.0 ms (8%)\n",
        "3.00 GiB",
        "after iteration 20: ",
        "so far  1 start, 1 failure, 2 updates skipped\n",
        f"alarms  6, the last {LAST_ALARMS}\n",
    ):
        assert part in text, text
    assert "remaining" not in text
    assert [line.strip() for line in lines[-3:]] == [line.strip() for line in report.splitlines()]
    assert text.count("loss spike  ") == LAST_ALARMS - 1
    everything = "\n".join(run_lines(state_at(path), all_alarms=True))
    assert everything.count("loss spike  ") == LAST_ALARMS


@pytest.mark.parametrize(
    ("kinds_so_far", "lost"),
    [
        (["start", "end"], 0),
        (["start", "stop", "start", "failure", "start", "end"], 0),
        (["start", "start", "end"], 1),
        (["start", "skipped", "start"], 2),
    ],
)
def test_starts_without_an_end_are_counted(tmp_path, kinds_so_far, lost):
    path = make_run(tmp_path / "a", 3, [event(kind, at=NOW - 500) for kind in kinds_so_far])
    state = state_at(path)
    assert state.lost == lost
    (so_far,) = [line for line in run_lines(state) if line.strip().startswith("so far")]
    assert ("without an end" in so_far) == (lost > 0)


def test_a_running_run_says_how_long_it_takes_and_who_is_silent(tmp_path):
    ranks = [record(rank, beat=NOW - (0 if rank == 0 else 99)) for rank in range(12)]
    path = make_run(tmp_path / "a", 20, [event("start", train_iters=20 + 7200)], ranks)
    lines = list(run_lines(state_at(path)))
    assert lines[0] == (
        "a: running, iteration 20 of 7,220, 12 ranks, no heartbeat of 11 of them: "
        "1 2 3 4 5 6 7 8 ..., last heard of 0 s ago"
    )
    assert any(line.endswith("remaining  about 1 h 0 min") for line in lines)


def test_several_runs_are_a_table(tmp_path):
    one = make_run(tmp_path / "one", 20, [event("start", train_iters=40), event("skipped")])
    states = [state_at(one), state_at(make_run(tmp_path / "another"))]
    header, first, second = runs_table(states)
    assert header.split()[:2] == ["run", "state"]
    assert first.split() == [
        *("one", "silent", "20", "of", "40", "0.5000", "0.5500", "2,000", "-", "1")
    ]
    assert second.split() == ["another", "not", "started", "-", "-", "-", "-", "-", "0"]
    assert len({len(line) for line in (header, first, second)}) == 1


def test_a_number_that_is_none_is_null_in_json(tmp_path):
    path = make_run(tmp_path)
    line = json.dumps(metrics(1, lm_loss=math.nan, grad_norm=math.inf))
    RunFolder(path).metrics.write_text(line + "\n")
    state = state_at(path)
    values = json.loads(json.dumps(state.as_dict(), allow_nan=False))
    assert (values["lm_loss"], values["grad_norm"]) == (None, None)
    assert values["step_parts"]["compute_seconds"] == 0.2
    assert "loss  nan" in "\n".join(run_lines(state))


def test_the_number_of_iterations_comes_from_the_newest_start_else_from_a_checkpoint(tmp_path):
    path = make_run(tmp_path / "a", 1, [event("start")])
    assert state_at(path).train_iters is None
    folder = make_checkpoint(path, 1, 40)
    assert state_at(path).train_iters == 40
    (folder / "run.json").write_text("{")
    assert state_at(path).train_iters is None
    starts = [event("start", train_iters=50), event("start", train_iters=60), event("end")]
    assert state_at(make_run(tmp_path / "b", 1, starts)).train_iters == 60


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("cut"))


@given(data=st.data())
def test_a_cut_file_tells_what_is_before_the_cut(cut, data):
    folder, lines = RunFolder(cut), metrics_lines(25)
    text = "".join(lines)
    end = data.draw(st.integers(0, len(text)))
    folder.metrics.write_text(text[:end])
    # The newline itself may be what is missing.
    whole = (text[:end] + "\n").count("}\n")
    state = state_at(cut)
    assert state.iteration == (whole or None)
    assert state.validation_iteration == (whole // 10 * 10 or None)
    assert state.window == min(whole, WINDOW)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\0" * 100,
        b"\n\n",
        b"[]",
        b'{"kind": 5}',
        b"{}",
        b'"x',
        b'{"iteration": "x"}',
        b"1e999",
    ],
)
def test_damaged_lines_are_passed_over(name, damage, tmp_path):
    happened = [event("start", NOW - 999), event("end", NOW - 999)]
    file = make_run(tmp_path, 3, happened, [record(state="ended")]) / name
    whole = file.read_bytes()
    for content in (damage + b"\n" + whole, whole + damage, whole + damage + b"\n"):
        file.write_bytes(content)
        state = state_at(tmp_path)
        assert (state.state, state.iteration, state.starts) == ("finished", 3, 1)
        assert list(run_lines(state))


@pytest.mark.parametrize("damage", [b"", b"\0" * 2048, b"{}", b'{"rank": 0'])
def test_a_damaged_record_is_that_of_no_rank(damage, tmp_path):
    make_run(tmp_path, 3, [event("start")], [record(), record(1)])
    RunFolder(tmp_path).record(0).write_bytes(damage)
    state = state_at(tmp_path)
    assert (state.state, state.ranks) == ("running", 1)


@pytest.mark.parametrize("missing", ["metrics.jsonl", "events.jsonl", "ranks", "failures"])
def test_any_file_may_be_missing(missing, tmp_path):
    make_run(tmp_path, 2, [event("start", NOW - 99)], [record(beat=NOW - 99)])
    (tmp_path / missing).rename(tmp_path / "elsewhere")
    state = state_at(tmp_path)
    assert state.state == "silent"
    assert state.iteration == (None if missing == "metrics.jsonl" else 2)
    assert list(run_lines(state)) and list(runs_table([state]))


def test_what_has_hardly_started_can_be_shown(tmp_path):
    RunFolder(tmp_path).make()
    state = state_at(tmp_path)
    assert state.state == "not started"
    assert next(run_lines(state)) == f"{tmp_path.name}: not started"
    EventLog(RunFolder(tmp_path).events).add("start", 0, "at the beginning", train_iters=7)
    state = state_at(tmp_path, time.time())
    assert (state.state, state.train_iters, state.iteration) == ("silent", 7, None)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "none: no such folder"),
        ("file", "file: is a file"),
        ("empty", "empty: holds nothing that a run writes"),
        ("x" * 300, "File name too long"),
        ("odd", "odd: metrics.jsonl is no file"),
        ("pipe", "pipe: events.jsonl is no file"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(name, said, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "events.jsonl")
    with pytest.raises(InputError) as caught:
        read_run(tmp_path / name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_runs_are_called_by_their_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    assert names_of([Path("x"), Path()]) == ["x", tmp_path.name]
    assert names_of([Path("x/run"), Path("y/run"), Path("z")]) == ["x/run", "y/run", "z"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.6, "1 min 0 s"),
        (61, "1 min 1 s"),
        (7261, "2 h 1 min"),
        (3600 * 24 * 1000, "1,000 d 0 h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
