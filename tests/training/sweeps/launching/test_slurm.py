"""What is told to Slurm and read from it; the real one is asked in tests/slurm."""

from pathlib import Path

import pytest

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.launching.slurm import (
    check_place,
    job_name,
    queue_states,
    sbatch_options,
    states_of,
    submit,
)
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder
from tests.training.command import ROOT
from tests.training.sweeps.example_runs import planned


def test_runs_in_the_queue_are_told_by_their_places_in_the_plan():
    text = "ours 1 PENDING\nother 0 RUNNING\nours 0 RUNNING\nours N/A RUNNING\nours 7 PENDING\n\n"
    assert states_of(text, "ours", ["a", "b"]) == {"a": "RUNNING", "b": "PENDING"}


def test_a_sweep_s_jobs_have_a_name_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert job_name(SweepFolder(Path("a"))) == job_name(SweepFolder(tmp_path / "a"))
    assert job_name(SweepFolder(Path("a"))) != job_name(SweepFolder(Path("b")))


def test_options_are_split_as_a_shell_does():
    assert sbatch_options("--time=1 --comment='a b'") == ["--time=1", "--comment=a b"]
    assert sbatch_options("") == []


@pytest.mark.parametrize("text", ["--array=0-3", "-J name", "--output=x", "--job-name x", "-a0"])
def test_options_by_which_runs_are_found_are_refused(text):
    with pytest.raises(InputError, match=r"is the launcher's, .*; leave it out"):
        sbatch_options(text)


def test_an_open_quote_is_refused():
    with pytest.raises(InputError, match=r"--sbatch-options .*No closing quotation; close it"):
        sbatch_options("--comment='a")


def test_a_batch_job_finds_its_files_or_is_not_submitted(tmp_path, monkeypatch):
    (tmp_path / "sbatch").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(ROOT)
    check_place(SweepFolder(Path("runs/sweep")))
    with pytest.raises(InputError, match="has blanks"):
        check_place(SweepFolder(tmp_path / "a b"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"batch jobs start in {ROOT}, .*; call the command there"):
        check_place(SweepFolder(tmp_path / "sweep"))


def test_without_slurm_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="--slurm: there is no sbatch here; leave it out"):
        check_place(SweepFolder(tmp_path))
    with pytest.raises(
        InputError, match=r"lines.txt: runs of this sweep went to Slurm, and there is"
    ):
        queue_states(SweepFolder(tmp_path), [planned("a")])


@pytest.mark.parametrize("is_known", [False, True])
def test_slurm_is_not_asked_about_a_sweep_that_it_refused(tmp_path, monkeypatch, is_known):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho invalid partition >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = SweepFolder(tmp_path / "sweep")
    if is_known:
        folder.write(folder.lines, "")
    with pytest.raises(InputError, match="--slurm: sbatch: invalid partition"):
        submit(folder, [planned("a")], ["a"], 1, [])
    assert folder.lines.exists() == is_known
