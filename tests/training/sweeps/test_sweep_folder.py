"""A sweep's plan is there as a whole, or not at all."""

import json
import math
import os

import pytest

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder
from tests.training.sweeps.example_runs import planned

RUNS = [planned("a"), planned("b", flags={"lr": 0.1})]


def test_a_plan_is_read_as_it_was_written(tmp_path):
    folder = SweepFolder(tmp_path / "new" / "sweep")
    folder.write_plan(RUNS)
    assert folder.read_plan() == RUNS
    assert os.listdir(folder.path) == ["sweep.json"]


def test_a_plan_that_cannot_be_written_leaves_the_old_one(tmp_path):
    folder = SweepFolder(tmp_path)
    folder.write_plan(RUNS)
    (tmp_path / "sweep.json.writing").mkdir()
    with pytest.raises(InputError, match=r"--runs-dir .*; give a writable file"):
        folder.write_plan(RUNS[:1])
    assert folder.read_plan() == RUNS


def test_no_plan_is_told_with_the_way_out(tmp_path):
    with pytest.raises(InputError, match=r"No such file.*give a folder that launch_sweep.py run"):
        SweepFolder(tmp_path).read_plan()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": [{"name": "a"}]}', '{"runs": 3}'])
def test_what_is_no_plan_is_named(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(InputError, match="not a sweep's plan"):
        SweepFolder(tmp_path).read_plan()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "../elsewhere"),
        ("name", None),
        ("name", "a" * 300),
        ("train_iters", 0),
        ("flops", "many"),
        ("flops", 10**400),
        ("learning_rate", math.nan),
        ("size", None),
        ("flags", []),
    ],
)
def test_a_plan_that_was_damaged_is_named(tmp_path, field, value):
    folder = SweepFolder(tmp_path)
    folder.write_plan(RUNS)
    content = json.loads(folder.plan.read_text())
    content["runs"][1][field] = value
    folder.plan.write_text(json.dumps(content))
    with pytest.raises(InputError, match="not a sweep's plan") as caught:
        folder.read_plan()
    assert "\n" not in str(caught.value)


def test_no_run_is_there_twice(tmp_path):
    folder = SweepFolder(tmp_path)
    folder.write_plan([RUNS[0], RUNS[0]])
    with pytest.raises(InputError, match="two runs have one name"):
        folder.read_plan()
