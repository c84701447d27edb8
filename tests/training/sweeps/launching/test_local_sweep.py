"""Runs as jobs of this machine, ended from outside before they do anything.

Sweeps that go on to their ends are tested with the command, in tests/tools.
"""

import io
import os
import signal
import threading
from dataclasses import replace

import pytest

from megatron_attnres.training.sweeps.launching.launches import read_launches
from megatron_attnres.training.sweeps.launching.local_lock import is_locked
from megatron_attnres.training.sweeps.launching.local_sweep import TRIES, LocalSweep
from megatron_attnres.training.sweeps.launching.progress_view import ProgressView
from megatron_attnres.training.sweeps.launching.standing_reading import read_standings
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder
from tests.training.command import make_corpus, right_flags
from tests.training.sweeps.example_runs import ITERATIONS, planned
from tests.training.watching.test_run_state import make_checkpoint, make_run


class Killer(threading.Thread):
    """Ends every job of a sweep as soon as it has begun, by a signal to its whole group."""

    def __init__(self, folder: SweepFolder, number: signal.Signals) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self._number = number
        self._done = threading.Event()
        # In the order in which they were started.
        self.killed: list[str] = []

    def run(self) -> None:
        seen: set[tuple[str, int]] = set()
        while not self._done.wait(0.02):
            for path in sorted(self._folder.path.glob("*/launches.jsonl")):
                for launch in read_launches(path):
                    if launch.status is None and (path.parent.name, launch.group) not in seen:
                        seen.add((path.parent.name, launch.group))
                        self.killed.append(path.parent.name)
                        os.killpg(launch.group, self._number)

    def __enter__(self) -> "Killer":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self.join()


def sweep_of(folder: SweepFolder, runs: list[PlannedRun], output: io.StringIO) -> LocalSweep:
    return LocalSweep(folder, read_standings(folder, runs, {}), 1, 1, ProgressView(output))


@pytest.fixture
def folder(tmp_path):
    return SweepFolder(tmp_path / "sweep")


@pytest.fixture
def runs(tmp_path):
    flags = right_flags(make_corpus(tmp_path, vocab_size=60))
    flags |= {"train-iters": ITERATIONS, "eval-interval": ITERATIONS}
    return [
        replace(planned("small", flops=1), flags=flags),
        replace(planned("large", flops=5), flags=flags),
    ]


def test_what_is_interrupted_is_tried_again_but_not_for_ever(folder, runs):
    output = io.StringIO()
    sweep = sweep_of(folder, runs, output)
    with Killer(folder, signal.SIGKILL) as killer:
        assert sweep.run(["small", "large"]) is None
    # The largest first; what was interrupted comes after the others.
    assert killer.killed == ["large", "small"] * TRIES
    assert [one.word for one in sweep.standings()] == ["interrupted", "interrupted"]
    lines = output.getvalue().splitlines()
    assert sum(line.endswith("; goes on, try 3 of 3") for line in lines) == 2
    assert sum(line.endswith("; not tried again") for line in lines) == 2
    assert not any(is_locked(folder.job_lock(run.name)) for run in runs)


def test_a_run_that_has_lost_its_end_is_trained_anew(folder, runs):
    run = make_run(folder.path / "small", ITERATIONS - 1)
    make_checkpoint(run, ITERATIONS, ITERATIONS)
    output = io.StringIO()
    sweep = sweep_of(folder, runs[:1], output)
    with Killer(folder, signal.SIGKILL):
        sweep.run(["small"])
    assert output.getvalue().startswith("started: small at the beginning\n")
    assert not folder.run("small").checkpoints.exists()


def test_what_has_saved_keeps_it(folder, runs):
    run = make_run(folder.path / "small", 5)
    saved = make_checkpoint(run, 4, ITERATIONS)
    output = io.StringIO()
    sweep = sweep_of(folder, runs[:1], output)
    with Killer(folder, signal.SIGKILL):
        sweep.run(["small"])
    assert output.getvalue().startswith("started: small after iteration 4\n")
    assert saved.is_dir()


def test_nothing_to_start_ends_at_once(folder, runs):
    sweep = sweep_of(folder, runs, io.StringIO())
    before = signal.getsignal(signal.SIGTERM)
    assert sweep.run([]) is None
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_ends_between_two_looks_is_not_forgotten(folder, runs):
    already = replace(read_standings(folder, runs[:1], {})[0], word="running")
    output = io.StringIO()
    sweep = LocalSweep(folder, [already], 1, 1, ProgressView(output))
    with Killer(folder, signal.SIGKILL) as killer:
        sweep.run([])
    assert killer.killed == ["small"] * TRIES
    assert output.getvalue().startswith("runs already: small after iteration 0 of 10\n")
