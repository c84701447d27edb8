"""Losses from sweeps: every run is a point, excluded by name, or an error."""

import json
import math
import os
from dataclasses import replace

import pytest

from megatron_attnres.analysis.scaling_laws.measurements.collecting import LossKind, collect
from megatron_attnres.analysis.scaling_laws.measurements.measuring import measured_in_sweeps
from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder
from megatron_attnres.training.watching.events import EventLog
from tests.analysis.scaling_laws.synthetic import FLAGS, plan, write_metrics, write_sweep

TWO = (plan("s0"), plan("s1"))


def collected(*paths, kind=LossKind.DECAYED, exclude=()):
    return collect(paths, kind, exclude)


def test_a_run_is_its_last_validation_loss(tmp_path):
    write_sweep(tmp_path, TWO, (5.0, 4.5))
    found = collected(tmp_path)
    assert [one.point.loss for one in found.tried] == [5.0, 4.5]
    first = found.tried[0].point
    assert (first.curve, first.size, first.seed, first.flops) == ("baseline", "s0", 1, 1e12)
    assert first.run == f"{tmp_path}/s0-baseline-lr0.01-seed1"


def test_a_line_that_a_crash_cut_does_not_matter(tmp_path):
    folder = write_sweep(tmp_path, TWO, (5.0, 4.5))
    metrics = folder.run(TWO[0].name).metrics
    metrics.write_text('{"iteration": 5, "lear\n' + metrics.read_text())
    assert len(collected(tmp_path).tried) == 2


def test_excluded_runs_are_not_looked_at_and_told(tmp_path):
    folder = write_sweep(tmp_path, TWO, (5.0, math.nan))
    os.mkfifo(folder.run(TWO[1].name).events)
    found = collected(tmp_path, exclude=["s1-*"])
    assert [one.point.size for one in found.tried] == ["s0"]
    assert found.excluded == (str(folder.run(TWO[1].name).path),)
    with pytest.raises(InputError, match=r"--exclude s9-\*: matches no run; give names such as"):
        collected(tmp_path, exclude=["s9-*"])


def test_a_folder_without_a_plan_or_runs(tmp_path):
    with pytest.raises(InputError, match=r"sweep\.json: No such file"):
        collected(tmp_path)
    SweepFolder(tmp_path).write_plan([])
    with pytest.raises(InputError, match="plans no runs"):
        collected(tmp_path)


def test_runs_that_are_not_finished_are_all_named(tmp_path):
    folder = write_sweep(tmp_path, TWO, (5.0, 4.5))
    folder.write_plan([*TWO, plan("s2"), plan("s3", train_iters=40)])
    write_metrics(folder, plan("s3"), 4.0)
    with pytest.raises(InputError) as raised:
        collected(tmp_path)
    message = str(raised.value)
    assert "s2-baseline-lr0.01-seed1 (not started)" in message
    assert "s3-baseline-lr0.01-seed1 (iteration 30 of 40): not finished; finish" in message
    assert "s0-" not in message


@pytest.mark.parametrize(
    ("loss", "changes", "message"),
    [
        (None, {}, "has no validation loss at its last iteration 30; train with an --eval-interv"),
        (math.nan, {}, "its validation loss is nan; it diverged"),
        (math.inf, {}, "its validation loss is inf; it diverged"),
        (4.5, {"iteration": 31}, "has trained 31 iterations, and the plan is 30"),
        (4.5, {"learning_rate": 0.002}, "ended at 20% of its highest learning rate"),
        (4.5, {"learning_rate": None}, "its metrics have no learning rate"),
    ],
)
def test_a_run_without_a_loss_that_counts_is_named(tmp_path, loss, changes, message):
    folder = write_sweep(tmp_path, TWO, (5.0, 4.5))
    write_metrics(folder, TWO[1], loss, **changes)
    with pytest.raises(InputError, match=f"{TWO[1].name}: {message}"):
        collected(tmp_path)


@pytest.mark.parametrize(
    ("first", "is_refused"), [(7.6, False), (4.6, False), (4.5, True), (3.0, True)]
)
def test_a_loss_as_at_the_start_has_diverged(tmp_path, first, is_refused):
    folder = write_sweep(tmp_path, TWO, (5.0, 4.5))
    metrics = folder.run(TWO[1].name).metrics
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(
        json.dumps(json.loads(lines[0]) | {"lm_loss": first}) + "\n" + "".join(lines[1:])
    )
    if is_refused:
        with pytest.raises(InputError, match=r"s1-.* its validation loss 4.5 is not below"):
            collected(tmp_path)
    else:
        assert len(collected(tmp_path).tried) == 2


def test_a_run_that_gave_up_at_its_end_is_not_finished(tmp_path):
    folder = write_sweep(tmp_path, TWO, (5.0, 4.5))
    EventLog(folder.run(TWO[1].name).events).add("gave up", 30, "11 updates skipped")
    with pytest.raises(
        InputError, match=r"s1-.* \(iteration 30 of 30, failed: 11 updates skipped\)"
    ):
        collected(tmp_path)


def test_an_unfinished_run_that_left_the_grid_is_left_out_and_told(tmp_path):
    folder = write_sweep(tmp_path, TWO, (5.0, 4.5))
    folder.write_plan([*TWO, plan("s2")], [plan("s2").name, TWO[0].name])
    found = collected(tmp_path)
    assert [one.point.size for one in found.tried] == ["s0", "s1"]
    assert found.excluded == (
        f"{tmp_path}/s2-baseline-lr0.01-seed1 (not finished, and no longer in its grid)",
    )


def test_a_final_loss_need_not_be_decayed(tmp_path):
    folder = write_sweep(tmp_path, TWO, (5.0, 4.5))
    write_metrics(folder, TWO[1], 4.4, learning_rate=0.01)
    assert collected(tmp_path, kind=LossKind.FINAL).tried[1].point.loss == 4.4


def test_the_same_run_in_two_sweeps(tmp_path):
    write_sweep(tmp_path / "a", TWO, (5.0, 4.5))
    write_sweep(tmp_path / "b", TWO[1:], (4.5,))
    with pytest.raises(InputError, match=r"a/s1-.* and .*/b/s1-.*: are the same run"):
        collected(tmp_path / "a", tmp_path / "b")
    assert len(collected(tmp_path / "a", tmp_path / "b", exclude=["*/b/s1-*"]).tried) == 2


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("split", "90,10,0", "--split is 98,2,0 and 90,10,0"),
        ("data-path", ["other"], "--data-path is text and other"),
        ("precision", "bf16", "--precision is not given and bf16"),
        (
            "eval-iters",
            10,
            "--eval-iters x --global-batch-size is 20 x not given and 10 x not given",
        ),
        ("global-batch-size", 8, "--eval-iters x --global-batch-size is 20 x not given and 160"),
    ],
)
def test_runs_that_were_measured_differently(tmp_path, flag, value, message):
    other = replace(TWO[1], flags=FLAGS | {flag: value})
    write_sweep(tmp_path, (TWO[0], other), (5.0, 4.5))
    with pytest.raises(InputError, match=f"s0-.* and .*s1-.*: {message}, so their losses cannot"):
        collected(tmp_path)


def test_sizes_may_have_batches_of_their_own_if_as_much_is_validated(tmp_path):
    batches = [(20, 8), (10, 16)]
    runs = [
        replace(run, flags=FLAGS | {"eval-iters": iterations, "global-batch-size": batch})
        for run, (iterations, batch) in zip(TWO, batches, strict=True)
    ]
    write_sweep(tmp_path, runs, (5.0, 4.5))
    assert len(collected(tmp_path).tried) == 2


def test_a_data_path_alone_is_the_list_of_it(tmp_path):
    runs = [
        replace(run, flags=FLAGS | {"data-path": path})
        for run, path in zip(TWO, ("text", ["text"]), strict=True)
    ]
    write_sweep(tmp_path, runs, (5.0, 4.5))
    assert len(collected(tmp_path).tried) == 2


def test_a_pipe_in_place_of_the_metrics_is_not_waited_for(tmp_path):
    write_sweep(tmp_path, TWO, (5.0, 4.5))
    metrics = next(tmp_path.glob("s1-*/metrics.jsonl"))
    metrics.unlink()
    os.mkfifo(metrics)
    with pytest.raises(InputError, match=r"s1-.*: metrics.jsonl is no file; give a readable"):
        collected(tmp_path)


@pytest.fixture
def rates(tmp_path):
    runs = [plan(rate=rate, seed=seed) for rate in (0.003, 0.01, 0.03) for seed in (1, 2)]
    write_sweep(tmp_path, [*runs, plan("s1")], (5.0, 5.2, 4.9, 5.0, 4.8, 5.4, 4.5))
    return tmp_path


def test_several_learning_rates_are_an_error(rates):
    with pytest.raises(InputError, match=r"learning rates 0\.003 and 0\.01 of one curve and size"):
        measured_in_sweeps([rates], LossKind.DECAYED, [], False)


def test_the_best_learning_rate_is_best_on_average_over_seeds(rates):
    found = measured_in_sweeps([rates], LossKind.DECAYED, [], True)
    assert [point.loss for point in found.points] == [4.9, 5.0, 4.5]
    assert len(found.worse) == 4
    (choice,) = found.choices
    assert (choice.learning_rate, choice.tried) == (0.01, (0.003, 0.01, 0.03))
    assert not choice.is_at_edge


def test_a_best_learning_rate_at_the_edge_is_told(rates):
    found = measured_in_sweeps([rates], LossKind.DECAYED, ["*lr0.03*"], True)
    assert found.choices[0].is_at_edge
