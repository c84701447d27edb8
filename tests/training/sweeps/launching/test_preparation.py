"""What is settled before the first run of a sweep starts."""

from dataclasses import replace

import pytest
import yaml

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.launching.preparation import (
    check_runs,
    extended_plan,
    training_arguments,
    write_flags,
)
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder
from tests.training.command import make_corpus, right_flags
from tests.training.sweeps.example_runs import planned

A, B, C = planned("a"), planned("b"), planned("c")


@pytest.fixture
def folder(tmp_path):
    return SweepFolder(tmp_path / "sweep")


def test_new_runs_come_after_the_known_ones_and_none_is_lost(folder):
    assert extended_plan(folder, [], [B, A]) == [B, A]
    assert extended_plan(folder, [B, A], [C, A]) == [B, A, C]


def test_a_plan_that_was_in_a_file_is_still_the_same(folder):
    run = planned("a", flags={"data-path": ("0.5", "x"), "lr": 0.1 + 0.2})
    folder.write_plan([run])
    assert extended_plan(folder, folder.read_plan(), [run]) == folder.read_plan()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (replace(A, flops=1), "flops 1000000000, in the grid with 1;"),
        (planned("a", flags={"lr": 0.02}), "lr 0.01, in the grid with 0.02;"),
        (planned("a", flags={"bf16": True}), "bf16 None, in the grid with True;"),
    ],
)
def test_a_known_run_that_is_planned_otherwise_is_refused(folder, changed, told):
    with pytest.raises(InputError) as error:
        extended_plan(folder, [A], [changed])
    assert f"run a is planned there with {told} give another --runs-dir" in str(error.value)


def test_another_budget_is_not_called_another_validation(folder):
    longer = planned("a", flags={"eval-interval": 20, "train-iters": 20}, train_iters=20)
    with pytest.raises(InputError, match="run a is planned there with train-iters 10, in the grid"):
        extended_plan(folder, [A], [longer])


def test_flags_become_a_file_that_a_run_reads(folder):
    flags = {"lr": 1e-05, "data-path": ("0.5", "a b"), "untie": False, "split": "98,2,0"}
    write_flags(folder, planned("a", flags=flags))
    read = yaml.safe_load(folder.flags("a").read_text())
    assert read == {**planned("a").flags, **flags, "data-path": ["0.5", "a b"]}


def test_a_grid_that_keeps_more_checkpoints_is_obeyed(folder):
    flags, keeps_more = folder.flags("a"), planned("a", flags={"keep-last": 3})
    assert training_arguments(folder, A, flags)[-2:] == ["--keep-last", "1"]
    assert "--keep-last" not in training_arguments(folder, keeps_more, flags)


def test_pretrain_s_own_checks_name_the_run_and_write_nothing(folder, tmp_path):
    right = right_flags(make_corpus(tmp_path, vocab_size=60))
    good = replace(A, flags=right)
    check_runs(folder, [good])
    with pytest.raises(InputError, match=r"^run b: --data-path .*nowhere"):
        check_runs(folder, [good, replace(B, flags={**right, "data-path": "nowhere"})])
    with pytest.raises(InputError, match=r"^run b: unknown key 'learning'"):
        check_runs(folder, [replace(B, flags={**right, "learning": 1})])
    assert not folder.path.exists()
