"""A sweep as a job array under a real Slurm: submitted once, found in the queue, finished."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import yaml

from megatron_attnres.training.sweeps.sweep_folder import SweepFolder
from tests.slurm.cluster import SlurmCluster, slurm_cluster, why_not
from tests.training.command import Finished, make_corpus, right_flags
from tests.training.command import run as run_command

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

TOOL = "tools/launch_sweep.py"
SECONDS = 120.0
DECIDED = ("num-layers", "hidden-size", "ffn-hidden-size", "num-query-groups", "train-iters")


class Sweep:
    """A grid whose middle run fails: its corpus has more ids than it is told."""

    def __init__(self, place: Path, cluster: SlurmCluster) -> None:
        self.folder = SweepFolder(place / "runs")
        self._cluster = cluster
        self._grid = place / "grid.yaml"
        flags = right_flags(make_corpus(place, vocab_size=60)) | {"eval-iters": 1}
        sizes = {
            name: {"num-layers": 4, "hidden-size": 16, "ffn-hidden-size": width} | more
            for name, width, more in (("a", 32, {}), ("b", 32, {"vocab-size": 50}), ("c", 48, {}))
        }
        content = {
            "flags": {name: value for name, value in flags.items() if name not in DECIDED},
            "sizes": sizes,
            "modes": ["block"],
            "num-blocks": [4],
            "tokens": 20 * flags["global-batch-size"] * flags["seq-length"],
            "learning-rates": [0.01],
            "seeds": [1],
        }
        self._grid.write_text(yaml.safe_dump(content))

    def run(self, *flags: str) -> Finished:
        options = "--sbatch-options=--ntasks-per-node=1 --time=5"
        arguments = [str(self._grid), "--runs-dir", str(self.folder.path), "--jobs=2", *flags]
        return self._tool("run", *arguments, "--slurm", options)

    def run_here(self) -> Finished:
        return self._tool("run", str(self._grid), "--runs-dir", str(self.folder.path))

    def standings(self) -> dict[str, str]:
        """By size."""
        answer = self._tool("status", str(self.folder.path), "--json")
        assert (answer.status, answer.stderr) == (0, "")
        return {one["run"][0]: one["standing"] for one in json.loads(answer.stdout)["runs"]}

    def table(self) -> str:
        return self._tool("status", str(self.folder.path)).stdout

    def log(self, name: str) -> str:
        return "".join(path.read_text() for path in self.folder.path.glob(f"slurm-*_{name}.log"))

    def _tool(self, *arguments: str) -> Finished:
        environment = {**self._cluster.environment, "PYTHON": sys.executable}
        return run_command([*arguments], SECONDS, (sys.executable, TOOL), **environment)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sweep(cluster, tmp_path_factory) -> Sweep:
    return Sweep(tmp_path_factory.mktemp("sweep"), cluster)


@pytest.fixture(scope="module")
def answers(sweep) -> dict[str, Finished]:
    """Submitted, submitted again at once, and again when all jobs have left the queue."""
    first, again, here = sweep.run(), sweep.run(), sweep.run_here()
    queued = sweep.standings()
    deadline = time.monotonic() + SECONDS
    while {"waiting", "running"} & set(sweep.standings().values()):
        assert time.monotonic() < deadline, sweep.table() + sweep.log("*")
        time.sleep(1)
    return {
        "first": first,
        "again": again,
        "here": here,
        "after": sweep.run(),
        "queued": queued,
    }


def test_an_array_is_submitted_and_its_job_named(answers):
    assert (answers["first"].status, answers["first"].stderr) == (0, "")
    assert "submitted: job " in answers["first"].stdout
    assert ", 3 runs, 2 at a time" in answers["first"].stdout


def test_runs_in_the_queue_are_not_submitted_again(answers):
    assert answers["again"].status == 0
    assert "nothing to submit" in answers["again"].stdout
    assert set(answers["queued"].values()) <= {"waiting", "running"}
    assert "waiting" in answers["queued"].values()


def test_runs_in_the_queue_are_not_started_here_either(answers):
    assert (answers["here"].status, answers["here"].stdout) == (2, "")
    assert "is in Slurm's queue" in answers["here"].stderr


def test_all_end_as_they_should(answers, sweep):
    assert sweep.standings() == {"a": "finished", "b": "failed", "c": "finished"}
    assert "failed: b-block4-lr0.01-seed1: --data-path" in sweep.table()


def test_what_has_failed_is_listed_and_not_submitted_again(answers):
    assert answers["after"].status == 1
    assert "nothing to submit" in answers["after"].stdout
    assert "failed: b-block4-lr0.01-seed1: --data-path" in answers["after"].stdout


def test_a_run_whose_record_was_lost_is_still_found_in_the_queue(answers, sweep, cluster):
    held = sweep.run("--retry-failed")
    assert held.status == 0, held.stdout
    assert ", 1 run, 2 at a time" in held.stdout
    # As if the launcher had been killed before it wrote down what it had submitted.
    os.remove(sweep.folder.launches("b-block4-lr0.01-seed1"))
    again = sweep.run("--retry-failed")
    assert "nothing to submit" in again.stdout
