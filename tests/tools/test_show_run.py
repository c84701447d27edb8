"""The command that shows runs, as a user calls it."""

import json
import sys
import time

import pytest

from megatron_attnres.training.watching.run_folder import RunFolder
from tests.training.command import ROOT, Finished
from tests.training.command import run as run_command
from tests.training.watching.test_run_state import event, make_run, record

TOOL = "tools/show_run.py"
PNG = b"\x89PNG\r\n\x1a\n"


def show(*arguments) -> Finished:
    return run_command([str(one) for one in arguments], command=(sys.executable, TOOL))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One that goes on for a while, one that has failed."""
    folder, now = tmp_path_factory.mktemp("runs"), time.time() + 3600
    begun, spike = event("start", train_iters=30), event("loss spike")
    alive = make_run(folder / "alive", 12, [begun, spike], [record(beat=now)])
    failed = make_run(folder / "failed", 5, [begun, event("failure", message="failed\n  cause")])
    return alive, failed


def test_one_run(runs):
    answer = show(runs[0])
    assert (answer.status, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    assert lines[0].startswith("alive: running, iteration 12 of 30, 1 rank, last heard of ")
    assert lines[-1].endswith("loss spike     loss spike")


def test_a_failure_is_told_in_full_and_is_no_failure_of_the_command(runs):
    answer = show(runs[1])
    assert answer.status == 0, answer.stderr
    assert answer.stdout.splitlines()[-2:] == [" " * 18 + "failed", " " * 18 + "  cause"]


def test_several_runs_are_a_line_each(runs):
    answer = show(*runs)
    assert answer.status == 0, answer.stderr
    assert [line.split()[:2] for line in answer.stdout.splitlines()] == [
        ["run", "state"],
        ["alive", "running"],
        ["failed", "failed"],
    ]
    lines = show(*runs, "--alarms").stdout.splitlines()
    assert len(lines) == 3 + 2 * 4
    assert sum("loss spike  " in line for line in lines) == 1


def test_a_state_is_one_word_for_scripts(runs):
    assert show(runs[0], "--state").stdout == "running\n"
    assert show(runs[1], "--state").stdout == "failed\n"


def test_json_has_everything(runs):
    answer = show(*runs, "--json")
    assert answer.status == 0, answer.stderr
    alive, failed = json.loads(answer.stdout)["runs"]
    assert (alive["state"], alive["iteration"], alive["alarms"][0]["kind"]) == (
        "running",
        12,
        "loss spike",
    )
    assert failed["failure"]["message"] == "failed\n  cause"


def test_curves_are_drawn_without_torch(runs, tmp_path):
    picture = tmp_path / "new" / "curves.png"
    code = (
        "import atexit, runpy, sys; "
        "atexit.register(lambda: print({'torch', 'matplotlib'} & set(sys.modules))); "
        f"sys.argv = [{TOOL!r}, *sys.argv[1:]]; runpy.run_path({TOOL!r}, run_name='__main__')"
    )
    for arguments, loaded in (
        ([str(runs[0])], "set()"),
        ([*map(str, runs), f"--plot={picture}"], "{'matplotlib'}"),
    ):
        answer = run_command(arguments, command=(sys.executable, "-c", code))
        assert answer.status == 0, answer.stderr
        assert answer.stdout.splitlines()[-1] == loaded
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "RUN"),
        (["{}/none"], "{}/none: no such folder"),
        (["{}/file"], "{}/file: is a file"),
        (["{}", "{}/failures"], "{}/failures: holds nothing that a run writes"),
        (["a" * 300], "File name too long"),
        (["{}", "--plot={}"], "--plot {}: is a folder"),
        (["{}", "--plot={}/file/x.png"], "/file/x.png: {}/file is no folder"),
        (["{}", "{}", "--state"], "--state: prints one word, but 2 runs"),
        (["{}", "--state", "--json"], "not allowed with"),
    ],
)
def test_bad_input_is_one_line(arguments, said, tmp_path):
    RunFolder(tmp_path).make()
    (tmp_path / "file").touch()
    answer = show(*(one.format(tmp_path) for one in arguments))
    assert (answer.status, answer.stdout) == (2, "")
    assert len(answer.stderr.splitlines()) == 1
    assert answer.stderr.startswith("show_run.py: ")
    assert said.format(tmp_path) in answer.stderr, answer.stderr


def test_it_runs_where_the_project_is_not_the_working_folder(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = run_command([str(runs[0])], command=(sys.executable, str(ROOT / TOOL)))
    assert answer.stdout.startswith("alive: running")
