"""CSV files: what is read, what is refused, and that what is written reads again."""

from dataclasses import replace

import pytest

from megatron_attnres.analysis.scaling_laws.measurements.csv_points import csv_text, read_csv
from megatron_attnres.analysis.scaling_laws.measurements.measuring import measured_in_csv
from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.planning.budgets import FLOPS_PER_PFLOPS_DAY
from tests.analysis.scaling_laws.synthetic import PAPER, points_of
from tests.training.command import ROOT


def written(tmp_path, text):
    path = tmp_path / "x.csv"
    path.write_text(text)
    return path


def test_both_units_and_comments(tmp_path):
    path = written(tmp_path, "# C is a guess\ncurve, size, pflop_s_days, loss\n\nfull,s,2,1.9\n")
    (point,) = read_csv(path)
    assert (point.curve, point.size, point.seed, point.loss) == ("full", "s", None, 1.9)
    assert point.flops == 2 * FLOPS_PER_PFLOPS_DAY
    assert point.run == f"{path} line 4"
    path = written(tmp_path, "loss,flops,seed,size,curve\n1.9,3e12,4,s,full\n")
    (point,) = read_csv(path)
    assert (point.seed, point.flops) == (4, 3e12)


def test_what_is_written_reads_again_to_the_last_digit(tmp_path):
    points = points_of("a,b", PAPER["baseline"], seeds=2, noise=0.01)
    again = read_csv(written(tmp_path, csv_text(points)))
    assert [vars(one) | {"run": ""} for one in again] == [vars(one) | {"run": ""} for one in points]


def test_a_name_that_looks_like_a_comment_comes_back(tmp_path):
    points = [replace(point, curve="# base") for point in points_of("baseline", PAPER["baseline"])]
    path = tmp_path / "points.csv"
    path.write_text(csv_text(points))
    assert [point.curve for point in read_csv(path)] == ["# base"] * len(points)


def test_the_papers_table_is_there():
    points = read_csv(ROOT / "examples/scaling/paper_table2.csv")
    assert len(points) == 15
    assert {point.curve for point in points} == {"baseline", "block8", "full"}


HEAD = "curve,size,flops,loss\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; give"),
        (HEAD, "has a header and no runs"),
        ("curve,size,flops,los\n", "unknown column 'los'; allowed are curve, size, loss, flops"),
        ("curve,size,flops\n", "has no column loss"),
        ("curve,size,loss\na,s,2\n", "has neither flops nor pflop_s_days; give one"),
        ("curve,size,flops,pflop_s_days,loss\n", "has flops and pflop_s_days; give one"),
        ("curve,size,size,flops,loss\n", "column size is there twice"),
        (HEAD + "a,s,3e12\n", "line 2: has 3 cells, and the header 4"),
        (HEAD + "a,s,3e12,high\n", "line 2: loss is 'high'; give a number"),
        (HEAD + "a,,3e12,2\n", "line 2: size is empty"),
        (HEAD + "a,s,5.6,2\n", "line 2: flops is 5.6, which looks like PFLOP/s-days"),
        (
            "curve,size,pflop_s_days,loss\na,s,4e13,2\n",
            "line 2: pflop_s_days is 4e13, which looks like FLOPs",
        ),
        ("curve,size,flops,loss,seed\na,s,3e12,2,one\n", "line 2: seed is 'one'"),
        (HEAD + 'a,"s,3e12,2\n', "line 2: no CSV"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, text, message):
    with pytest.raises(InputError, match=message) as raised:
        read_csv(written(tmp_path, text))
    assert str(raised.value).count("\n") == 0
    assert "x.csv" in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"none\.csv: No such file"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is no UTF-8 text"):
        read_csv(tmp_path / "bytes.csv")


@pytest.mark.parametrize(
    ("pattern", "left"), [("full", 2), ("*-full", 2), ("s0-full", 3), ("*line 2", 3), ("s0-*", 2)]
)
def test_lines_are_left_out_by_place_curve_or_size_and_curve(tmp_path, pattern, left):
    path = tmp_path / "points.csv"
    rows = [
        f"{curve},s{size},{size + 1}e12,4.5" for curve in ("baseline", "full") for size in (0, 1)
    ]
    path.write_text("\n".join(["curve,size,flops,loss", *rows]))
    assert len(measured_in_csv([path], [pattern]).points) == left
