"""What is written of starts and their ends is read again, also where a crash cut the file."""

import os

from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.training.sweeps.launching.launches import (
    Launch,
    last_words,
    launches_of,
    read_launches,
    write_end,
    write_start,
)

LOCAL = Launch(10.5, "log.txt", 7, "node", 123)
SLURM = Launch(11.0, "../slurm-5_0.log", slurm_job="5_0")


def test_starts_and_ends_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "launches.jsonl"
    write_start(path, LOCAL)
    write_end(path, 12.0, -9)
    write_start(path, SLURM)
    ended = Launch(10.5, "log.txt", 7, "node", 123, status=-9)
    assert read_launches(path) == [ended, SLURM]


def test_a_line_that_was_cut_hides_no_other(tmp_path):
    path = tmp_path / "launches.jsonl"
    write_start(path, LOCAL)
    with path.open("a") as file:
        file.write('{"kind": "end", "ti')
    write_start(path, SLURM)
    assert read_launches(path) == [LOCAL, SLURM]


def test_no_file_is_no_start(tmp_path):
    assert read_launches(tmp_path / "launches.jsonl") == []


JSON = st.sampled_from([None, True, 3, -0.5, "text", [], {}])
NAMES = st.sampled_from(["kind", "time", "log", "log_start", "host", "group", "status", "other"])
KINDS = st.fixed_dictionaries({"kind": st.sampled_from(["start", "end"])})


@given(st.lists(st.builds(lambda a, b: a | b, st.dictionaries(NAMES, JSON), KINDS)))
def test_damage_tells_less_and_never_something_of_another_type(lines):
    for launch in launches_of(lines):
        assert isinstance(launch.time, int | float)
        assert isinstance(launch.log, str)
        assert launch.status is None or isinstance(launch.status, int)


def test_last_words_are_those_of_the_newest_start(tmp_path):
    (tmp_path / "log.txt").write_bytes(b"old\n\xff new\n\n  newer \n")
    launches = [Launch(1.0, "log.txt"), Launch(2.0, "log.txt", log_start=4)]
    assert last_words(tmp_path, launches) == ["\N{REPLACEMENT CHARACTER} new", "newer"]
    assert last_words(tmp_path, launches, most=1) == ["newer"]
    assert last_words(tmp_path, launches[:1])[0] == "old"


def test_where_nothing_was_printed_there_are_no_last_words(tmp_path):
    assert last_words(tmp_path, []) == []
    assert last_words(tmp_path, [Launch(1.0, "log.txt")]) == []
    os.mkfifo(tmp_path / "pipe")
    assert last_words(tmp_path, [Launch(1.0, "pipe")]) == []
