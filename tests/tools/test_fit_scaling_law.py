"""The command that fits scaling laws, as a user calls it."""

import json
import sys

import pytest

from tests.analysis.scaling_laws.synthetic import laptop_sweep, plan, write_metrics
from tests.training.command import ROOT, Finished
from tests.training.command import run as run_command

TOOL = "tools/fit_scaling_law.py"
TABLE = "examples/scaling/paper_table2.csv"
PAPER = ("--constants", "baseline=1.891,0.057", "block=1.870,0.058")
PNG = b"\x89PNG\r\n\x1a\n"
FAST = ("--resamples", "100")


def fit(*arguments) -> Finished:
    return run_command([str(one) for one in arguments], command=(sys.executable, TOOL))


def numbers(answer: Finished) -> dict:
    """What was fitted, without where it came from."""
    content = json.loads(answer.stdout)
    return {name: content[name] for name in ("curves", "advantages")}


def test_the_papers_constants_give_the_papers_advantage():
    answer = fit(*PAPER, "--at", "5.6")
    assert (answer.status, answer.stderr) == (0, "")
    assert answer.stdout == (
        "block over baseline at 5.6 PFLOP/s-days: 1.25x (loss 1.6922 against 1.7141)\n"
    )
    same = fit(*PAPER, "--at", "4.8384e20 FLOPs", "--json")
    assert round(json.loads(same.stdout)["advantages"][0]["factor"], 2) == 1.25


def test_the_papers_table():
    answer = fit("--csv", TABLE, "--json", *FAST)
    assert answer.status == 0, answer.stderr
    found = json.loads(answer.stdout)
    fits = {(one["curve"], one["form"]): one for one in found["curves"]}
    assert len(fits) == 6
    baseline = fits["baseline", "power"]["coefficients"]
    assert baseline["A"] == pytest.approx(1.891, rel=0.01)
    assert baseline["alpha"] == pytest.approx(0.057, abs=0.001)
    low, high = fits["baseline", "power"]["intervals"]["alpha"]
    assert low < 0.057 < high
    block = found["advantages"][0]
    assert (block["curve"], block["over"]) == ("block8", "baseline")
    assert block["range"]["interval"][0] > 1
    assert any("offset is not identified" in line for line in found["warnings"])
    assert found["excluded"] == []


def test_a_sweep_is_written_and_its_points_fit_again(tmp_path):
    laptop_sweep(tmp_path / "sweep")
    output = tmp_path / "new" / "law"
    answer = fit(tmp_path / "sweep", "--output", output, "--exclude", "l4-full*", "--json", *FAST)
    assert answer.status == 0, answer.stderr
    assert answer.stderr.splitlines() == [
        f"written: {output / name}"
        for name in ("scaling_law.png", "scaling_law.json", "scaling_law.md", "points.csv")
    ]
    assert (output / "scaling_law.png").read_bytes().startswith(PNG)
    found = json.loads(answer.stdout)
    assert json.loads((output / "scaling_law.json").read_text()) == found
    assert found["excluded"] == [f"{tmp_path / 'sweep'}/l4-full-lr0.01-seed1"]
    assert found["curves"][0]["coefficients"]["alpha"] == pytest.approx(0.1, rel=1e-4)
    markdown = (output / "scaling_law.md").read_text()
    assert "| curve | form | A | alpha | E | noise |" in markdown
    assert "l4-full-lr0.01-seed1" in markdown
    again = fit("--csv", output / "points.csv", "--json", *FAST)
    assert numbers(again) == numbers(answer)


def test_text_has_tables_what_was_left_out_and_warnings(tmp_path):
    laptop_sweep(tmp_path)
    answer = fit(tmp_path, "--form", "power", "--exclude", "l4-*", *FAST)
    assert answer.status == 0, answer.stderr
    lines = answer.stdout.splitlines()
    titles = [line for line in lines if line and not line.startswith(" ")]
    assert titles == ["fits", "compute advantages", "points", "left out", "warnings"]
    assert sum("l4-" in line for line in lines) == 2


def test_of_several_learning_rates_the_best_is_taken(tmp_path):
    folder = laptop_sweep(tmp_path)
    more = plan("l0", rate=0.03, flops=int(8e11))
    folder.write_plan([*folder.read_plan(), more])
    write_metrics(folder, more, 9.9)
    refused = fit(tmp_path, *FAST)
    assert refused.status == 2
    assert "learning rates 0.01 and 0.03 of one curve and size" in refused.stderr
    answer = fit(tmp_path, "--best-learning-rate", "--form", "power", *FAST)
    assert answer.status == 0, answer.stderr
    assert "baseline, l0: 0.01 of 0.01, 0.03" in answer.stdout
    assert "at the edge of those tried" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no points: give one of SWEEP, --csv and --constants"),
        (["a", "--csv", TABLE], "SWEEP and --csv: give one of"),
        (["none"], "none/sweep.json: No such file or directory; give a folder"),
        (["--csv", "none.csv"], "--csv none.csv: No such file or directory"),
        (["--csv", TABLE, "--loss", "final"], "--loss: says nothing with --csv"),
        (["--csv", TABLE, "--at", "5 FLOP"], "--at: '5 FLOP' has no unit that is known"),
        (["--csv", TABLE, "--at", "-1"], "--at -1: give 1e-20 to 1e+20 PFLOP/s-days"),
        (["--csv", TABLE, "--at", "nan"], "--at nan: give 1e-20"),
        (["--csv", TABLE, "--at", "1e-320 FLOPs"], "--at 1e-320 FLOPs: give 1e-20"),
        (["--csv", TABLE, "--baseline", "plain"], "--baseline plain: no such curve"),
        (["--csv", TABLE, "--exclude", "*line 99"], "--exclude *line 99: matches no run"),
        (["--csv", TABLE, TABLE], "both are curve baseline, size 194M, no seed"),
        (["--csv", TABLE, "--exclude", "*"], "no runs: nothing is left to fit"),
        (["--csv", TABLE, "--output", "README.md"], "--output README.md: "),
        (["--csv", TABLE, "--resamples", "9"], "--resamples: '9' is not allowed"),
        ([*PAPER], "--constants: have no points that say at which compute; add --at"),
        ([*PAPER, "--at", "5", "--output", "x"], "--output: says nothing with --constants"),
        (["--constants", "a=1", "--at", "5"], "--constants a=1: give a name, A, alpha"),
        (["--constants", "a=1,0", "--at", "5"], "--constants a=1,0: A and alpha above 0"),
        (["--constants", "a=1,1", "a=2,1", "--at", "5"], "a is given twice"),
        (["--constants", "a=1,1", "--at", "5"], "--constants: a single law has none to compare"),
        (["--constants", "a=1,40", "b=1,1", "--at", "1e-8"], "a has a loss of inf at 1e-08"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    answer = fit(*arguments)
    assert (answer.status, answer.stdout) == (2, "")
    assert message in answer.stderr
    assert answer.stderr.startswith("fit_scaling_law.py: ")
    assert answer.stderr.count("\n") == 1


def test_points_that_are_read_are_not_written_over(tmp_path):
    points = tmp_path / "points.csv"
    points.write_bytes((ROOT / TABLE).read_bytes())
    ended = fit("--csv", str(points), "--output", str(tmp_path))
    assert (ended.status, ended.stdout) == (2, "")
    assert "its points.csv is read here; give another folder" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["points.csv"]


def test_nothing_needs_torch(tmp_path):
    code = (
        "import atexit, runpy, sys; "
        "atexit.register(lambda: print('torch' in sys.modules)); "
        f"sys.argv = ['fit', '--csv', {TABLE!r}, '--output', {str(tmp_path)!r}, '--resamples', "
        "'100', '--form', 'power', '--json']; "
        f"runpy.run_path({TOOL!r}, run_name='__main__')"
    )
    answer = run_command([], command=(sys.executable, "-c", code))
    assert answer.status == 0, answer.stderr
    assert answer.stdout.splitlines()[-1] == "False"
