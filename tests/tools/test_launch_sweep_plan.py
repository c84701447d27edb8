"""The planner of sweeps, as a user calls it."""

import json
import subprocess
import sys

import pytest

from tests.training.command import ROOT, Finished
from tests.training.command import run as run_command
from tests.training.sweeps.planning.grids import grid, written

TOOL = "tools/launch_sweep.py"


def sweep(*arguments) -> Finished:
    return run_command([str(one) for one in arguments], command=(sys.executable, TOOL))


def test_a_table(tmp_path):
    answer = sweep("plan", written(tmp_path, grid()), "--tflops", "0.5", "--jobs", "2")
    assert (answer.status, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    assert lines[0].split()[-3:] == ["FLOPs", "PFLOP/s-days", "hours"]
    assert lines[-2].startswith("6 runs ")
    assert lines[-1] == "hours at 0.5 TFLOP/s of each run; in total with 2 runs at a time"


def test_one_json_object(tmp_path):
    answer = sweep("plan", written(tmp_path, grid()), "--json", "--vocab-size", "1000")
    plan = json.loads(answer.stdout)
    assert plan["totals"]["runs"] == len(plan["runs"]) == 6
    first = plan["runs"][0]
    assert first["parameters"] - first["non_embedding_parameters"] == 1024 * 16


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "the following arguments are required: command; see --help"),
        (("plann",), "command: invalid choice: 'plann'"),
        (("plan",), "the following arguments are required: GRID.yaml; see --help"),
        (("plan", "nowhere.yaml"), "nowhere.yaml: No such file or directory; give a readable file"),
        (("plan", "nowhere.yaml", "--tflops", "0"), "--tflops 0.0: must be above 0"),
        (("plan", "nowhere.yaml", "--jobs", "2"), "--jobs 2: is for hours in total; add --tflops"),
        (("plan", "nowhere.yaml", "--vocab-size", "0"), "--vocab-size: '0' is not allowed, a who"),
    ],
)
def test_bad_input_is_one_line(arguments, said):
    answer = sweep(*arguments)
    assert (answer.status, answer.stdout) == (2, "")
    assert answer.stderr.startswith(f"launch_sweep.py: {said}")
    assert answer.stderr.count("\n") == 1


def test_help_names_the_subcommand():
    answer = sweep("plan", "--help")
    assert answer.status == 0
    assert answer.stdout.startswith("usage: launch_sweep.py plan [-h]")


def test_planning_loads_no_torch(tmp_path):
    code = (
        "import sys; sys.argv[0] = 'tools/launch_sweep.py'; sys.path.insert(0, 'tools')\n"
        f"import launch_sweep; launch_sweep.main(['plan', {str(written(tmp_path, grid()))!r}])\n"
        "print('torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.splitlines()[-1] == "False"
