"""The file of events: whole lines, whoever writes and whatever crashes."""

import json
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_attnres.training.watching.events import EventLog, read_events


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def test_events_are_said_and_kept(path, capsys):
    log = EventLog(path)
    log.add("start", 0, "at the beginning", train_iters=5)
    log.add("loss spike", 3, "too high — ümlaut\nsecond line")
    first, second = read_events(path)
    assert (first["kind"], first["iteration"], first["train_iters"]) == ("start", 0, 5)
    assert second["message"] == "too high — ümlaut\nsecond line"
    assert first["time"] <= second["time"]
    said = capsys.readouterr()
    assert said.err == "[start] at the beginning\n[loss spike] too high — ümlaut\nsecond line\n"
    assert said.out == ""


def test_without_a_file_events_are_only_said(capsys):
    EventLog(None).add("end", 5, "done")
    assert capsys.readouterr().err == "[end] done\n"


def test_a_disk_that_cannot_be_written_is_said(tmp_path, capsys):
    EventLog(tmp_path / "nowhere" / "events.jsonl").add("end", 5, "done")
    assert "nowhere/events.jsonl: not written: No such file" in capsys.readouterr().err


def test_no_file_has_no_events(path):
    assert read_events(path) == []


def test_a_cut_last_line_is_left_out_and_not_continued(path):
    log = EventLog(path)
    log.add("start", 0, "one")
    log.add("stop", 4, "two")
    for length in range(1, 20):
        path.write_bytes(path.read_bytes()[:-length])
        log.add("start", 4, "three")
        assert [event["message"] for event in read_events(path)][-1] == "three"
    assert read_events(path)[0]["message"] == "one"


def test_lines_that_are_no_events_are_left_out(path):
    path.write_text('7\n[1]\nnull\n\n{"kind": "end"}\nrubbish\n')
    assert read_events(path) == [{"kind": "end"}]


@given(st.text(max_size=50))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_an_event_is_one_line_whatever_it_says(path, message):
    before = len(read_events(path))
    EventLog(path).add("end", 1, message)
    assert len(path.read_bytes().splitlines()) == before + 1
    assert read_events(path)[-1]["message"] == message


def test_events_of_several_writers_do_not_mix(path):
    """The ranks of a failure's report make it longer than what a file buffers."""
    ranks = list(range(8192))

    def write(name: str) -> None:
        for _ in range(20):
            EventLog(path).add("failure", 1, name, ranks=ranks)

    writers = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    # One that sees half of another's line ends it: an empty line harms nobody.
    lines = [line for line in path.read_text().splitlines() if line]
    assert len(lines) == 60
    assert all(json.loads(line)["ranks"] == ranks for line in lines)
