"""The whole command: it is stopped, killed, started again, and ends as if nothing had happened."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.training.checkpoints.crashes import (
    INTERVAL,
    ITERATIONS,
    crash_rounds,
    lines_of,
    resumable_flags,
    start,
    wait_for_lines,
    whole_run,
)
from tests.training.command import as_arguments, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def flags(folder):
    return resumable_flags(folder)


@pytest.fixture(scope="module")
def whole(folder, flags):
    """The folder of an uninterrupted run and its metrics."""
    return whole_run(folder, flags)


@pytest.fixture(scope="module")
def one_iteration(folder, flags) -> Path:
    """The folder of a run without dropout whose time is over at once."""
    out = folder / "short"
    flags = flags | {
        "save": out,
        "metrics-file": out / "metrics.jsonl",
        "exit-duration-minutes": 1e-4,
        "save-interval": None,
        "hidden-dropout": 0.0,
    }
    answer = run(as_arguments(flags))
    assert answer.status == 0, answer.stderr
    return out


def test_twenty_steps_after_a_resume_are_those_of_the_whole_run_to_the_last_bit(
    folder, flags, whole
):
    out = folder / "resumed"
    shutil.copytree(whole[0] / "saved", out / "saved")
    start = out / "saved" / f"iter_{INTERVAL:07d}"
    flags = flags | {"load": start, "metrics-file": out / "metrics.jsonl", "save-interval": None}
    answer = run(as_arguments(flags))
    assert answer.status == 0, answer.stderr
    found = lines_of(out / "metrics.jsonl")
    assert [line["iteration"] for line in found] == list(range(INTERVAL + 1, ITERATIONS + 1))
    assert found == whole[1][INTERVAL:]


def test_dropout_is_on(whole, one_iteration):
    """So that what is resumed holds its random numbers too."""
    without = lines_of(one_iteration / "metrics.jsonl")
    assert without[0]["lm_loss"] != whole[1][0]["lm_loss"]


def test_another_layout_goes_on_with_the_same_losses(folder, flags, whole):
    out = folder / "other"
    flags = flags | {
        "load": whole[0] / "saved" / f"iter_{INTERVAL:07d}",
        "metrics-file": out / "metrics.jsonl",
        "save-interval": None,
        "nproc-per-node": 2,
        "tensor-model-parallel-size": 2,
        "sequence-parallel": True,
        "pipeline-model-parallel-size": None,
        "virtual-pipeline-model-parallel-size": None,
        "micro-batch-size": 4,
        "zero-stage": 0,
    }
    answer = run(as_arguments(flags))
    assert answer.status == 0, answer.stderr
    found = [line["lm_loss"] for line in lines_of(out / "metrics.jsonl")]
    wanted = [line["lm_loss"] for line in whole[1][INTERVAL:]]
    assert found[:10] == pytest.approx(wanted[:10], rel=1e-5)
    assert found == pytest.approx(wanted, rel=1e-4)


def test_another_order_of_samples_is_refused(folder, flags, whole):
    """More iterations take more epochs, which are shuffled together."""
    flags = flags | {
        "load": whole[0] / "saved",
        "train-iters": 20 * ITERATIONS,
        "lr-decay-iters": ITERATIONS,
        "save-interval": None,
    }
    answer = run(as_arguments(flags))
    assert answer.status == 2, answer.stderr
    assert "samples are not the first ones of this run's data" in answer.stderr


def test_a_save_that_fails_is_reported_and_tried_again(folder, flags, whole):
    """A file is in the way of the first save's folder."""
    out = folder / "failing"
    out.mkdir()
    (out / f"iter_{INTERVAL:07d}").write_text("in the way")
    flags = flags | {"save": out, "train-iters": INTERVAL + 3, "lr-decay-iters": ITERATIONS}
    answer = run(as_arguments(flags | {"save-interval": INTERVAL}))
    assert answer.status == 0, answer.stderr
    (line,) = [line for line in answer.stderr.splitlines() if "warning: --save" in line]
    assert f"iter_{INTERVAL:07d}" in line
    assert "attempt 1 of 3, the run goes on" in line
    names = sorted(path.name for path in out.iterdir() if path.is_dir())
    assert f"iter_{INTERVAL + 3:07d}" in names
    assert len(names) == 2, "one of the next iterations, and the last"
    shutil.rmtree(out)
    out.mkdir()
    (out / f"iter_{INTERVAL:07d}").write_text("in the way")
    answer = run(as_arguments(flags | {"save-interval": INTERVAL, "save-retries": 0}))
    assert answer.status == 2, answer.stderr
    assert answer.stderr.strip().splitlines()[-1].startswith("pretrain_attnres.py: --save")


def test_pauses_are_measured_and_old_checkpoints_go(folder, flags, whole):
    out = folder / "rotated"
    lines = (whole[0] / "metrics.jsonl").read_text().splitlines()
    paused = [one["iteration"] for one in map(json.loads, lines) if "save_pause_seconds" in one]
    assert paused == list(range(INTERVAL, ITERATIONS + 1, INTERVAL))
    flags = flags | {"save": out, "keep-last": 2, "keep-every": 8, "async-save": None}
    answer = run([*as_arguments(flags), "--no-async-save"])
    assert answer.status == 0, answer.stderr
    names = sorted(path.name for path in out.iterdir())
    assert names == ["iter_0000008", "iter_0000016", "iter_0000020", "iter_0000024", "latest"]


def test_a_signal_ends_the_run_with_a_checkpoint(folder, flags, whole):
    """Twice, and the third start ends as a run that nobody stopped."""
    out = folder / "signals"
    flags = flags | {
        "save": out / "saved",
        "metrics-file": out / "metrics.jsonl",
        "save-interval": None,
        "save-on-signal": True,
        "load": "auto",
    }
    done = 0
    for number in (signal.SIGTERM, signal.SIGUSR1):
        process = start(flags)
        wait_for_lines(out / "metrics.jsonl", done + 4, process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        before, done = done, len(lines_of(out / "metrics.jsonl"))
        assert before + 4 <= done < ITERATIONS
        assert (out / "saved" / "latest").read_text() == f"iter_{done:07d}\n"
    answer = run(as_arguments(flags))
    assert answer.status == 0, answer.stderr
    assert lines_of(out / "metrics.jsonl") == whole[1]


def test_a_run_ends_when_its_time_is_over(one_iteration):
    assert len(lines_of(one_iteration / "metrics.jsonl")) == 1
    assert (one_iteration / "latest").read_text() == "iter_0000001\n"


def test_a_rank_killed_at_any_moment_costs_an_interval_at_most(folder, flags, whole):
    """Saves every three iterations; auto goes on each time; the end is the same to the last bit."""
    crash_rounds(folder / "crashes", flags, whole[1], rounds=2, seed=1)
