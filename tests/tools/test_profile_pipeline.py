"""The profiler as a user runs it: a job with real ranks, its files, and input that is wrong."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.training.command import ROOT, as_arguments, make_corpus, right_flags, run

COMMAND = (sys.executable, str(ROOT / "tools" / "profile_pipeline.py"))
FILES = {"timelines.json", "trace.json", "report.txt", "timeline.png"}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Four iterations on P = 2, V = 2, DP = 2."""
    return right_flags(make_corpus(tmp_path_factory.mktemp("corpus"), vocab_size=60)) | {
        "nproc-per-node": 4,
        "pipeline-model-parallel-size": 2,
        "virtual-pipeline-model-parallel-size": 2,
        "attn-res-block-size": 2,
        "global-batch-size": 8,
        "train-iters": 4,
    }


@pytest.fixture(scope="module")
def profile(tmp_path_factory, flags):
    """The folder of a profile of iterations 2 and 3, and what the command printed."""
    folder = tmp_path_factory.mktemp("profile")
    training = flags | {"metrics-file": folder / "metrics.jsonl"}
    answer = run(
        [str(folder), "--json", "--profile-pipeline=2:3", "--", *as_arguments(training)],
        command=COMMAND,
    )
    assert answer.status == 0, answer.stderr
    return folder, answer


def test_the_report_has_the_recorded_steps_and_the_plans_bytes(profile):
    folder, answer = profile
    report = json.loads(answer.stdout)
    steps = report["steps"]
    assert [step["iteration"] for step in steps] == [2, 2, 3, 3]
    assert sorted(rank for step in steps[:2] for rank in step["ranks"]) == [0, 1, 2, 3]
    assert report["bytes_as_planned"]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for direction in ("forward", "backward"):
        seen = sum(
            hop["num_bytes"]
            for step in steps[:2]
            for hop in step["hops"]
            if hop["direction"] == direction
        )
        assert seen == metrics[1][f"p2p_bytes_{direction}"] > 0


def test_rank_0s_own_step_lies_within_its_iteration(profile):
    """Other ranks may enter an iteration before rank 0, whose clock takes ``step_seconds``."""
    folder, answer = profile
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    own_seconds = {
        step["iteration"]: stage["seconds"] - stage["idle"]
        for step in json.loads(answer.stdout)["steps"]
        for stage in step["stages"]
        if stage["rank"] == 0
    }
    assert own_seconds.keys() == {2, 3}
    for iteration, seconds in own_seconds.items():
        assert 0 < seconds <= metrics[iteration - 1]["step_seconds"]


def test_all_files_are_written_and_the_trace_has_every_rank(profile):
    folder, _ = profile
    assert {path.name for path in folder.iterdir()} >= FILES
    trace = json.loads((folder / "trace.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert len(names) == 4
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_profile_is_read_again_without_a_run(profile):
    folder, _ = profile
    answer = run([str(folder)], command=COMMAND)
    assert answer.status == 0, answer.stderr
    assert answer.stdout.startswith((folder / "report.txt").read_text().splitlines()[0])
    assert "bytes are as planned" in answer.stdout


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty", "", "not JSON"),
        ("other", '{"format": "something"}', "format"),
        ("cut", None, "not JSON"),
    ],
)
def test_a_malformed_profile_is_refused_in_one_line(profile, tmp_path, name, content, said):
    if content is None:
        content = (profile[0] / "timelines.json").read_text()[:-50]
    file = tmp_path / f"{name}.json"
    file.write_text(content)
    answer = run([str(file)], command=COMMAND)
    assert answer.status == 2
    assert answer.stderr.count("\n") == 1
    assert f"{name}.json" in answer.stderr and said in answer.stderr


def test_what_cannot_be_recorded_is_refused(tmp_path, flags):
    for arguments, said in (
        ([str(tmp_path / "none")], "none: No such file"),
        (["a" * 300], "File name too long"),
        ([str(tmp_path), "--profile-pipeline=1:2"], "after --"),
        ([str(tmp_path), "--", "--help"], "--profile-pipeline is missing"),
    ):
        answer = run(arguments, command=COMMAND)
        assert answer.status == 2, arguments
        assert said in answer.stderr and answer.stderr.count("\n") == 1


def test_a_profile_that_cannot_be_written_does_not_stop_the_training(tmp_path, flags):
    (tmp_path / "timelines.json").mkdir()
    metrics = tmp_path / "metrics.jsonl"
    training = flags | {"nproc-per-node": 2, "profile-pipeline": "1:2", "metrics-file": metrics}
    answer = run(as_arguments(training | {"profile-pipeline-dir": tmp_path}))
    assert answer.status == 0, answer.stderr
    assert len(metrics.read_text().splitlines()) == flags["train-iters"]
    assert f"--profile-pipeline-dir {tmp_path}: not written" in answer.stderr


def test_a_signal_to_the_command_ends_the_job(tmp_path, flags):
    metrics = tmp_path / "metrics.jsonl"
    training = flags | {"nproc-per-node": 2, "train-iters": 100_000, "metrics-file": metrics}
    command = [*COMMAND, tmp_path, "--profile-pipeline=1:2", "--", *as_arguments(training)]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) != 0
    finally:
        process.kill()
    written = metrics.read_text()
    time.sleep(1.5)
    assert metrics.read_text() == written, "no rank trains on"


@pytest.mark.parametrize("window", ["3", "0:2", "3:2", "1:5", "a:b", "1:2:3"])
def test_a_window_that_is_none_is_refused(tmp_path, flags, window):
    answer = run(
        as_arguments(flags | {"profile-pipeline": window, "profile-pipeline-dir": tmp_path})
    )
    assert answer.status == 2
    assert f"--profile-pipeline {window}: must be two iterations FROM:TO" in answer.stderr


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"profile-pipeline": "1:2"}, "needs --profile-pipeline-dir"),
        ({"profile-pipeline": "1:2", "profile-pipeline-dir": ""}, "needs --profile-pipeline-dir"),
        ({"profile-pipeline": "1:" + 5000 * "9", "profile-pipeline-dir": "x"}, "two iterations"),
        ({"profile-pipeline-dir": "x"}, "needs --profile-pipeline FROM:TO"),
        (
            {
                "profile-pipeline": "1:2",
                "profile-pipeline-dir": "x",
                "pipeline-model-parallel-size": 1,
                "virtual-pipeline-model-parallel-size": 1,
            },
            "has no hops to profile",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, changed, said):
    answer = run(as_arguments(flags | changed))
    assert answer.status == 2
    assert said in answer.stderr and answer.stderr.count("\n") == 1
