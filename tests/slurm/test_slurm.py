"""The batch scripts of examples/slurm under a real Slurm: plain, preempted, with ranks lost.

All jobs train the same run, 2 nodes x 2 ranks; whatever happens to a job, it must end with the
metrics of the one to which nothing happened, to the last bit. Two jobs run at a time: much of the
long ones is waiting.
"""

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster import SlurmCluster, slurm_cluster, why_not
from tests.training.command import MEASURED_FIELDS, ROOT, make_corpus, right_flags

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ITERATIONS = 30
# Before a time limit: a whole minute, the unit of limits, so that the next look of the controller
# gives the warning; and between two looks of the controller at the limits.
WARNING_SECONDS = 60
CONTROLLER_SECONDS = 30
TWO_RANKS = ("--ntasks-per-node=2",)
# What a rank waits for another one; the job must have ended after twice as long.
TIMEOUT_SECONDS = 30.0
END_SECONDS = 60.0
START_SECONDS = 120.0


@dataclass(frozen=True)
class Job:
    """A submitted run."""

    cluster: SlurmCluster
    id: int
    folder: Path
    log: Path

    def iterations(self) -> int:
        """Lines of the metrics file."""
        path = self.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def metrics(self) -> list[dict]:
        """Without what depends on time."""
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [{k: v for k, v in line.items() if k not in MEASURED_FIELDS} for line in lines]

    def until(self, holds: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> float:
        """Wait; how long it took."""
        begin = time.monotonic()
        while not holds():
            if time.monotonic() - begin > seconds:
                raise AssertionError(f"waited {seconds:.0f} s for {what}:\n{self.log.read_text()}")
            self.cluster.state(self.id)
            time.sleep(0.2)
        return time.monotonic() - begin

    def count(self, text: str) -> int:
        """How often the log says something."""
        return self.log.read_text().count(text) if self.log.exists() else 0

    def trains(self, iteration: int) -> None:
        """Wait until an iteration is done."""
        self.until(lambda: self.iterations() >= iteration, f"iteration {iteration}")

    def let_time_run_out(self) -> None:
        """A limit, in Slurm's whole minutes, before which the controller looks at least once."""
        hours, minutes, seconds = map(int, self.cluster.job(self.id)["RunTime"].split(":"))
        passed = 3600 * hours + 60 * minutes + seconds
        self.set_time_limit(math.ceil((passed + CONTROLLER_SECONDS + 5) / 60))

    def set_time_limit(self, minutes: int) -> None:
        """As an administrator may."""
        self.cluster.command("scontrol", "update", f"JobId={self.id}", f"TimeLimit={minutes}")

    def finishes(self) -> None:
        """Wait until all iterations are done."""
        self.until(lambda: self.cluster.state(self.id) == "COMPLETED", "the end")

    def process_of(self, rank: int) -> psutil.Process:
        """A rank of the current start."""
        return self.cluster.ranks_of(self.id)[rank]


@dataclass(frozen=True)
class Failure:
    """What was seen of a provoked failure: the report, and seconds until the job had ended."""

    report: str
    seconds: float


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """P = 2, V = 2, DP = 2; saved every other iteration."""
    folder = tmp_path_factory.mktemp("slurm-corpus")
    flags = right_flags(make_corpus(folder, vocab_size=60)) | {
        "pipeline-model-parallel-size": 2,
        "virtual-pipeline-model-parallel-size": 2,
        "attn-res-block-size": 2,
        "global-batch-size": 8,
        "train-iters": ITERATIONS,
        "lr": 1e-2,
        "save-interval": 2,
        "distributed-timeout-minutes": TIMEOUT_SECONDS / 60,
        "heartbeat-seconds": 1,
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(flags))
    return path


@pytest.fixture(scope="module")
def submit(cluster, config, tmp_path_factory):
    """Submits a run by one of the scripts. Two that start at once must not write one index."""

    def submit(script: str, *flags: str, options: tuple[str, ...] = ()) -> Job:
        folder = tmp_path_factory.mktemp("run")
        log = folder / "job.log"
        job = cluster.submit(
            ROOT / "examples" / "slurm" / script,
            f"--data-cache-path={folder / 'cache'}",
            *flags,
            options=(f"--output={log}", "--time=10", "--nodes=2", *options),
            CONFIG=str(config),
            RUN_DIR=str(folder / "run"),
            REPOSITORY=str(ROOT),
            PYTHON=sys.executable,
            RANKS_PER_NODE="2",
        )
        return Job(cluster, job, folder / "run", log)

    return submit


@pytest.fixture(scope="module")
def stories(submit) -> dict[str, Future]:
    """All jobs, the longest first, two at a time: while one waits the other one computes.

    More at once would keep one another from ending within what Slurm grants those it asks to end.
    """
    with ThreadPoolExecutor(max_workers=2) as pool:
        return {
            story.__name__: pool.submit(story, submit)
            for story in (failing, preempted_twice, plain, by_torchrun, cancelled)
        }


@pytest.fixture(scope="module")
def undisturbed(stories) -> Job:
    """The run to which nothing happens."""
    return stories["plain"].result()


def plain(submit: Callable[..., Job]) -> Job:
    """Nothing happens to it."""
    job = submit("pretrain.sbatch", options=(*TWO_RANKS, "--nodelist=n1,n2"))
    job.finishes()
    return job


def by_torchrun(submit: Callable[..., Job]) -> Job:
    """Nothing happens to it."""
    job = submit("pretrain_torchrun.sbatch", options=("--nodelist=n1,n2", "--cpus-per-task=2"))
    job.finishes()
    return job


def cancelled(submit: Callable[..., Job]) -> Job:
    """By its user."""
    job = submit("pretrain.sbatch", options=(*TWO_RANKS, "--nodelist=n1,n2"))
    job.trains(1)
    job.cluster.command("scancel", str(job.id))
    job.until(lambda: job.count("[job] stopped in order, and ended by Slurm") == 1, "its last word")
    job.until(lambda: job.cluster.state(job.id) == "CANCELLED", "the end")
    return job


def preempted_twice(submit: Callable[..., Job]) -> Job:
    """By the administrator, and by the time limit."""
    job = submit(
        "pretrain.sbatch",
        # Rank 0 will stand still until the limit is near.
        "--distributed-timeout-minutes=5",
        options=(*TWO_RANKS, "--nodelist=n1,n2", f"--signal=USR1@{WARNING_SECONDS}"),
    )
    job.trains(5)
    job.cluster.command("scontrol", "requeue", str(job.id))
    job.until(lambda: job.count("[start]") == 2, "the second start")
    job.trains(job.iterations() + 5)
    # So that the run does not end before its time is over; Slurm's warning wakes it.
    job.process_of(0).suspend()
    job.let_time_run_out()
    job.until(lambda: job.count("SIGUSR1: stopped") == 1, "the second stop")
    job.set_time_limit(10)
    job.finishes()
    return job


def failing(submit: Callable[..., Job]) -> tuple[Job, dict[str, Failure]]:
    """A rank is killed, another one hangs, a node is lost, each in a start of its own."""
    job = submit("pretrain.sbatch", options=(*TWO_RANKS, "--nodelist=n3,n4"))
    failures = {}
    for number, (name, provoke) in enumerate(
        (
            ("killed", lambda: job.process_of(3).kill()),
            ("hung", lambda: job.process_of(1).suspend()),
            ("node lost", lambda: job.cluster.kill_node("n4")),
        )
    ):
        job.until(lambda wanted=number + 1: job.count("[start]") == wanted, f"start {number + 1}")
        job.trains(job.iterations() + 5)
        before = len(list((job.folder / "failures").glob("*.txt")))
        provoke()
        seconds = job.until(
            lambda wanted=number + 1: job.count("[job] failed with status") == wanted,
            "the job's end",
            END_SECONDS,
        )
        reports = sorted((job.folder / "failures").glob("*.txt"))
        assert len(reports) == before + 1
        failures[name] = Failure(reports[-1].read_text(), seconds)
        if name == "node lost":
            job.until(lambda: job.cluster.state(job.id) == "PENDING", "the way back")
            job.cluster.start_node("n4")
    job.finishes()
    return job, failures


def test_four_ranks_on_two_nodes_train_to_the_end(undisturbed):
    assert [line["iteration"] for line in undisturbed.metrics()] == [*range(1, ITERATIONS + 1)]
    assert "4 ranks on 2 hosts (n1, n2), Slurm job" in undisturbed.log.read_text()
    assert undisturbed.log.read_text().rstrip().endswith("[job] done")


def test_torchrun_gives_the_same_metrics_to_the_last_bit(stories, undisturbed):
    assert stories["by_torchrun"].result().metrics() == undisturbed.metrics()


def test_a_job_that_is_preempted_twice_ends_as_if_it_had_not_been(stories, undisturbed):
    job = stories["preempted_twice"].result()
    assert job.count("a rank got SIGTERM: stopped after iteration") == 1
    assert job.count("a rank got SIGUSR1: stopped after iteration") == 1
    assert job.count("[failure]") == 0
    assert job.count("[start] after iteration") == 2
    assert job.metrics() == undisturbed.metrics()


def test_a_cancelled_job_has_saved_and_stays_cancelled(stories):
    job = stories["cancelled"].result()
    assert job.count("[job] stopped in order, and ended by Slurm") == 1
    (stop,) = re.findall(r"stopped after iteration (\d+)", job.log.read_text())
    assert (job.folder / "checkpoints" / f"iter_{int(stop):07d}").is_dir()


def test_a_job_that_fails_in_every_way_ends_as_if_it_had_not(stories, undisturbed):
    job, failures = stories["failing"].result()
    assert job.count("[failure]") == 3
    assert job.count("Traceback") == 0
    assert job.metrics() == undisturbed.metrics()
    for name, failure in failures.items():
        assert failure.seconds < END_SECONDS, name
        assert len(failure.report.splitlines()) < 15
        assert "--load auto goes on after iteration" in failure.report


@pytest.mark.parametrize(
    ("name", "who"),
    [
        ("killed", "rank 3 on n4: "),
        ("hung", "rank 1 on n3: "),
        ("node lost", "host n4, all of its 2 ranks; rank 2: "),
    ],
)
def test_the_report_names_the_cause(stories, name, who):
    report = stories["failing"].result()[1][name].report
    (cause,) = [line for line in report.splitlines() if line.startswith("  cause")]
    assert cause.startswith(f"  cause    {who}"), report
    assert re.search(r"last heartbeat \d+ s ago in iteration \d+, ", cause)
    # What the others waited for: a hop with its micro-batch, or a collective's part of the step.
    assert re.search(r"seen by  rank \d on n\d, (forward and backward: .* hop|\w+ing )", report)


def test_the_scripts_are_clean_shell():
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("Debian's shellcheck is not installed")
    scripts = sorted((ROOT / "examples").rglob("*.s*"))
    done = subprocess.run(
        [shellcheck, "--shell=bash", "--exclude=SC1091", *map(str, scripts)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
