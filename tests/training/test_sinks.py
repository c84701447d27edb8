"""Files of a run whose disk is full, or whose start dies before its first iteration."""

import errno
import json
import os

from megatron_attnres.training.sinks import JsonLinesFile, Sinks


def test_what_was_measured_stays_if_the_next_start_dies_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"iteration": iteration}) + "\n" for iteration in range(1, 6)]
    path.write_text("".join(lines) + '{"iter')
    JsonLinesFile(str(path), 4)
    assert path.read_text() == "".join(lines[:4]), "before anything is written or closed"
    assert os.listdir(tmp_path) == [path.name]


def test_a_new_run_begins_a_file_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n')
    JsonLinesFile(str(path), 0)
    assert path.read_text() == ""


class FullDisk:
    """A sink that cannot be written."""

    def write(self, metrics: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        self.write(None)


class Kept(list):
    """A sink that can."""

    write = list.append
    __hash__ = object.__hash__

    def close(self) -> None:
        self.append("closed")


def test_a_full_disk_is_said_once_and_training_goes_on(capfd):
    kept = Kept()
    sinks = Sinks([FullDisk(), kept])
    for iteration in range(3):
        sinks.write(iteration)
    sinks.close()
    assert kept == [0, 1, 2, "closed"]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("FullDisk: not written: ") and "No space left" in line
