"""The commands that launch a sweep and look at it, as a user calls them, also when killed.

A sweep whose launcher and jobs were stopped, then killed, must end with the same table as one to
which nothing happened, to the last bit.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_attnres.training.sweeps.launching.launches import read_launches
from megatron_attnres.training.sweeps.launching.local_lock import is_locked
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder
from tests.training.command import MEASURED_FIELDS, ROOT, Finished, make_corpus, right_flags
from tests.training.command import run as run_command

TOOL = "tools/launch_sweep.py"
ITERATIONS = 80
JOBS = 3
SECONDS = 120.0
SEED = 5
# What the grid's sizes, modes and budgets say.
DECIDED = ("num-layers", "hidden-size", "ffn-hidden-size", "num-query-groups", "train-iters")


def tool(*arguments) -> Finished:
    return run_command([str(one) for one in arguments], SECONDS, (sys.executable, TOOL))


@dataclass
class Sweep:
    """A grid and where its runs are."""

    grid: Path
    folder: SweepFolder

    def arguments(self) -> list[str]:
        runs_dir = ["--runs-dir", str(self.folder.path)]
        return [str(self.grid), *runs_dir, f"--jobs={JOBS}", "--threads=1"]

    def run(self, *flags) -> Finished:
        return tool("run", *self.arguments(), *flags)

    def start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, TOOL, "run", *self.arguments()],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def status(self) -> dict[str, dict]:
        """By run."""
        answer = tool("status", self.folder.path, "--json")
        assert answer.status == 0, answer.stderr
        return {one["run"]: one for one in json.loads(answer.stdout)["runs"]}

    def iteration(self, name: str) -> int:
        path = self.folder.run(name).metrics
        return path.read_text().count("\n") if path.exists() else 0

    def alive(self) -> list[str]:
        names = [path.parent.name for path in self.folder.path.glob("*/job.lock")]
        return [name for name in sorted(names) if is_locked(self.folder.job_lock(name))]

    def group(self, name: str) -> int:
        return read_launches(self.folder.launches(name))[-1].group

    def metrics(self, name: str) -> list[dict]:
        """Without what depends on time."""
        lines = map(json.loads, self.folder.run(name).metrics.read_text().splitlines())
        return [{k: v for k, v in line.items() if k not in MEASURED_FIELDS} for line in lines]


@pytest.fixture(scope="module")
def grid(tmp_path_factory) -> dict:
    """Three runs of one rank, one of two."""
    folder = tmp_path_factory.mktemp("corpus")
    flags = right_flags(make_corpus(folder, vocab_size=60)) | {
        "data-cache-path": str(folder / "cache"),
        "heartbeat-seconds": 0.5,
        "save-interval": 10,
        "global-batch-size": 8,
        "eval-iters": 2,
    }
    small = {"num-layers": 4, "hidden-size": 16, "ffn-hidden-size": 32}
    two_ranks = {"hidden-size": 24, "nproc-per-node": 2, "modes": ["baseline"]}
    return {
        "flags": {name: value for name, value in flags.items() if name not in DECIDED},
        "sizes": {"h16": small, "h24": small | two_ranks},
        "modes": ["baseline", "block", "full"],
        "num-blocks": [4],
        "tokens": ITERATIONS * flags["global-batch-size"] * flags["seq-length"],
        "learning-rates": [0.01],
        "seeds": [1],
    }


@pytest.fixture(scope="module")
def make_sweep(grid, tmp_path_factory) -> Callable[..., Sweep]:
    """A sweep of the grid with changes (None: without), in a folder of its own or that given."""

    def make(folder: SweepFolder | None = None, **changes) -> Sweep:
        place = tmp_path_factory.mktemp("sweep")
        path = place / "grid.yaml"
        content = {key: value for key, value in {**grid, **changes}.items() if value is not None}
        path.write_text(yaml.safe_dump(content))
        return Sweep(path, folder or SweepFolder(place / "runs"))

    return make


@pytest.fixture(scope="module")
def undisturbed(make_sweep) -> Sweep:
    """The sweep to which nothing happens."""
    sweep = make_sweep()
    answer = sweep.run()
    assert answer.status == 0, answer.stdout + answer.stderr
    assert answer.stdout.count("started: ") == answer.stdout.count("finished: ") == 4
    assert answer.stderr == ""
    return sweep


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def wait_for_training(sweep: Sweep, chance: random.Random) -> list[str]:
    """Until two jobs at least have done some more iterations; those that are alive."""
    before = {name: sweep.iteration(name) for name in sweep.alive()}
    more = chance.randint(3, 12)

    def far_enough() -> list[str]:
        return [
            name for name in sweep.alive() if sweep.iteration(name) >= before.get(name, 0) + more
        ]

    until(lambda: len(far_enough()) >= 2, "two jobs that train")
    return sweep.alive()


def kill_job(sweep: Sweep, name: str, chance: random.Random) -> None:
    """All its processes at once, or the command alone."""
    group = sweep.group(name)
    everything = [psutil.Process(group), *psutil.Process(group).children(recursive=True)]
    for process in everything if chance.random() < 0.5 else everything[1:2]:
        process.kill()


@dataclass(frozen=True)
class Story:
    """What was seen of a sweep that was stopped, then killed, then left alone."""

    sweep: Sweep
    second_launcher: Finished
    stopped: str
    stopped_status: int
    after_stop: dict[str, dict]
    alive_after_stop: list[str]
    survivors: list[str]
    last: Finished


@pytest.fixture(scope="module")
def story(make_sweep) -> Story:
    """Once asked to stop; then the launcher and two jobs are killed at random; then to the end."""
    sweep, chance = make_sweep(), random.Random(SEED)
    launcher = sweep.start()
    wait_for_training(sweep, chance)
    second_launcher = sweep.run()
    launcher.send_signal(signal.SIGINT)
    stopped, _ = launcher.communicate(timeout=SECONDS)
    alive_after_stop, after_stop = sweep.alive(), sweep.status()

    killed = sweep.start()
    until(lambda: len(sweep.alive()) == JOBS, "the jobs")
    victims = chance.sample(wait_for_training(sweep, chance), 2)
    killed.kill()
    for name in victims:
        kill_job(sweep, name, chance)
    killed.communicate(timeout=SECONDS)
    survivors = [name for name in sweep.alive() if name not in victims]
    return Story(
        sweep,
        second_launcher,
        stopped,
        launcher.returncode,
        after_stop,
        alive_after_stop,
        survivors,
        sweep.run(),
    )


def test_a_sweep_ends_with_a_table_of_finished_runs(undisturbed):
    answer = tool("status", undisturbed.folder.path)
    assert (answer.status, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    assert [line.split()[:5] for line in lines[1:5]] == [
        [run.name, "finished", str(ITERATIONS), "/", str(ITERATIONS)]
        for run in undisturbed.folder.read_plan()
    ]
    assert lines[6] == "4 runs: 4 finished; 100.0% of FLOPs done"


def test_a_sweep_that_was_stopped_and_killed_ends_with_the_same_table(story, undisturbed):
    assert story.last.status == 0, story.last.stdout + story.last.stderr
    expected, found = undisturbed.status(), story.sweep.status()
    for name, run in expected.items():
        assert found[name]["standing"] == "finished"
        assert found[name]["validation_loss"] == run["validation_loss"]
        assert story.sweep.metrics(name) == undisturbed.metrics(name)


def test_a_second_launcher_ends_with_one_line(story):
    assert story.second_launcher.status == 2
    assert story.second_launcher.stderr.count("\n") == 1
    assert "another launcher (process " in story.second_launcher.stderr


def test_a_launcher_that_is_stopped_lets_its_jobs_save_and_waits_for_them(story):
    assert story.stopped_status == 128 + signal.SIGINT
    assert f"SIGINT: {JOBS} runs asked to save and end" in story.stopped
    assert story.stopped.rstrip().endswith("stopped; call the same command again to go on")
    assert story.alive_after_stop == []
    asked = [one for one in story.after_stop.values() if one["iteration"]]
    assert len(asked) >= 2
    assert {one["ended_by"] for one in asked} == {"stopped in order"}


def test_jobs_outlive_their_launcher_and_are_found_again(story):
    assert len(story.survivors) == JOBS - 2
    for name in story.survivors:
        # It goes on where it was: nobody had to start it again.
        assert f"started: {name} " not in story.last.stdout
        assert f"runs already: {name} " in story.last.stdout


def test_finished_runs_are_skipped(undisturbed):
    before = undisturbed.folder.plan.read_bytes()
    answer = undisturbed.run()
    assert (answer.status, answer.stderr) == (0, "")
    assert "started" not in answer.stdout
    assert undisturbed.folder.plan.read_bytes() == before


def test_runs_that_left_the_grid_are_named_and_kept(undisturbed, make_sweep):
    answer = make_sweep(undisturbed.folder, modes=["baseline"], **{"num-blocks": None}).run()
    assert answer.status == 0, answer.stdout + answer.stderr
    assert "kept as they are and not started: h16-block4-lr0.01-seed1, h16-full" in answer.stdout
    assert len(undisturbed.status()) == 4
    assert undisturbed.run().status == 0


def test_a_run_that_was_never_done_and_left_the_grid_is_nothing_to_wait_for(undisturbed):
    folder = undisturbed.folder
    before = folder.plan.read_bytes()
    runs = folder.read_plan()
    folder.write_plan([*runs, replace(runs[0], name="h16-left")], ["h16-left"])
    answer = tool("status", folder.path, "--watch")
    folder.plan.write_bytes(before)
    assert (answer.status, answer.stdout.count("4 finished, 1 dropped; 100.0%")) == (0, 1)


def test_a_run_that_is_planned_otherwise_is_refused(undisturbed, make_sweep, grid):
    changed = make_sweep(undisturbed.folder, flags={**grid["flags"], "eval-iters": 3})
    answer = changed.run()
    assert (answer.status, answer.stdout) == (2, "")
    assert answer.stderr.count("\n") == 1
    assert "is planned there with eval-iters 2, in the grid with 3; give ano" in answer.stderr


def test_bad_input_of_any_run_starts_nothing(make_sweep, grid):
    sweep = make_sweep(flags={**grid["flags"], "data-path": "nowhere"})
    answer = sweep.run()
    assert (answer.status, answer.stdout) == (2, "")
    assert answer.stderr.count("\n") == 1
    assert "run h16-baseline-lr0.01-seed1: --data-path nowhere" in answer.stderr
    assert os.listdir(sweep.folder.path) == ["launcher.lock"]


def test_a_failed_run_is_listed_with_its_error_and_started_again_only_when_asked(make_sweep, grid):
    # The corpus has more ids than that, which only training finds.
    flags = {**grid["flags"], "vocab-size": 50}
    sizes = {"h16": grid["sizes"]["h16"]}
    sweep = make_sweep(flags=flags, sizes=sizes, modes=["full"], **{"num-blocks": None})
    first, second, third = sweep.run(), sweep.run(), sweep.run("--retry-failed")
    for answer, starts in ((first, 1), (second, 0), (third, 1)):
        assert (answer.status, answer.stderr) == (1, "")
        assert answer.stdout.count("started: ") == starts
        assert answer.stdout.count("interrupted") == 0
        [line] = {one for one in answer.stdout.splitlines() if one.startswith("failed: ")}
        assert "h16-full-lr0.01-seed1: --data-path" in line
    assert line in tool("status", sweep.folder.path).stdout


def test_watching_ends_with_the_last_run(undisturbed):
    answer = tool("status", undisturbed.folder.path, "--watch")
    assert (answer.status, answer.stdout.count("4 finished")) == (0, 1)


def test_what_is_no_sweep_is_refused(tmp_path):
    answer = tool("status", tmp_path)
    assert (answer.status, answer.stdout) == (2, "")
    assert "give a folder that launch_sweep.py run wrote to" in answer.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--slurm", "--threads=2"], "--threads 2: is for runs on this machine"),
        (["--sbatch-options=--time=1"], "--sbatch-options '--time=1': add --slurm"),
        (["--sbatch-options", "--time=1"], "--sbatch-options '--time=1': add --slurm"),
        (["--sbatch-options", "--time=1 -p a"], "--sbatch-options '--time=1 -p a': add --slurm"),
        (["--jobs=0"], "--jobs"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(tmp_path, flags, told):
    answer = tool("run", "grid.yaml", "--runs-dir", tmp_path / "sweep", *flags)
    assert (answer.status, answer.stderr.count("\n")) == (2, 1)
    assert told in answer.stderr
    assert not (tmp_path / "sweep").exists()


def test_no_command_loads_torch(undisturbed):
    script = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    for arguments in (["run", *undisturbed.arguments()], ["status", str(undisturbed.folder.path)]):
        answer = run_command(arguments, SECONDS, (sys.executable, "-c", script, TOOL))
        assert answer.stdout.splitlines()[-1] == "False", answer.stderr
