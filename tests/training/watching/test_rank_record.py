"""What a rank says of itself comes back whole, fits its file, and is never taken for another's."""

import json
import os
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_attnres.training.watching import rank_record
from megatron_attnres.training.watching.rank_record import (
    ERROR_CHARACTERS,
    RECORD_BYTES,
    host_name,
    read_record,
    read_records,
    write_record,
)
from megatron_attnres.training.watching.run_folder import RunFolder
from tests.training.watching.records import record, waiting


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank_00000.json"


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(rank_record.time, "sleep", lambda seconds: None)


@pytest.mark.parametrize(
    "one",
    [
        record(3),
        waiting(4, 5),
        record(5, state="ended"),
        record(6, state="failed", error="ValueError: no such thing", own_fault=True),
        record(7, state="failed", error=""),
    ],
)
def test_what_is_written_is_read(path, one):
    write_record(path, one)
    assert read_record(path) == one
    assert path.stat().st_size == RECORD_BYTES


DIFFICULT = {
    "plain": "a",
    "quotes": '"',
    "backslashes": "\\",
    "control characters": "\x00",
    "letters of two bytes": "ü",
    "letters beyond sixteen bits": "😀",
    "halves of a pair": "\ud83d",
}


@pytest.mark.parametrize("letter", DIFFICULT.values(), ids=DIFFICULT)
def test_a_long_error_of_any_letters_fits(path, letter):
    write_record(path, waiting(0, 1, state="failed", error=f"Error: {letter * 5000}"))
    assert path.stat().st_size == RECORD_BYTES
    error = read_record(path).error
    assert error.startswith(f"Error: {letter * 100}")
    assert len(error) <= ERROR_CHARACTERS
    # What comes after is not followed by the rest of what was there.
    write_record(path, record(0))
    assert read_record(path) == record(0)


@given(st.text(st.characters(), max_size=2000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_any_error_is_read_up_to_where_it_was_cut(path, error):
    write_record(path, record(0, error=error))
    assert path.stat().st_size == RECORD_BYTES
    found = read_record(path).error
    assert error.startswith(found)
    assert len(found) == min(len(error), ERROR_CHARACTERS) or len(found) > 100


def test_no_file_is_no_record(path):
    assert read_record(path) is None


TORN = {
    "empty": b"",
    "cut": b'{"rank": 0, "host"',
    "another version": b'{"rank": 0, "colour": "red"}',
    "no object": b"[1, 2]",
    "not text": b"\xff\xfe\x00",
    "zeros": bytes(RECORD_BYTES),
}


@pytest.mark.parametrize("content", TORN.values(), ids=TORN)
def test_a_torn_file_is_no_record(path, content):
    path.write_bytes(content)
    assert read_record(path) is None


def test_a_reader_that_comes_between_looks_again(path, monkeypatch):
    path.write_bytes(b'{"rank": 0, "ho')
    monkeypatch.setattr(rank_record.time, "sleep", lambda seconds: write_record(path, record(0)))
    assert read_record(path) == record(0)


def test_a_reader_never_sees_two_records_in_one(path):
    """One thread writes short and long records in turn, this one reads."""
    short, long = record(0), waiting(0, 1, state="failed", error="x" * ERROR_CHARACTERS)
    write_record(path, short)
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            write_record(path, long)
            write_record(path, short)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = [read_record(path) for _ in range(300)]
    finally:
        ended.set()
        writer.join()
    assert set(found) <= {short, long, None}
    assert {short, long} & set(found)


def test_records_of_another_start_are_left_out(tmp_path):
    folder = RunFolder(tmp_path)
    folder.make()
    write_record(folder.record(0), record(0))
    write_record(folder.record(1), record(1, attempt="the one before"))
    folder.record(2).write_text("{")
    os.utime(folder.record(0), (5, 7))
    # Hosts' clocks may differ; the date of the file counts.
    assert read_records(folder, range(4), "first") == {0: record(0, beat=7.0)}


def test_records_are_written_in_place(path):
    write_record(path, record(0))
    before = path.stat().st_ino
    write_record(path, record(0, iteration=8))
    assert path.stat().st_ino == before
    assert json.loads(path.read_text())["iteration"] == 8


def test_a_folder_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(OSError):
        write_record(tmp_path / "nowhere" / "rank_00000.json", record(0))


def test_the_host_is_what_slurm_calls_it(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "gpu017")
    assert host_name() == "gpu017"
    monkeypatch.delenv("SLURMD_NODENAME")
    assert host_name() == os.uname().nodename
