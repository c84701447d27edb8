"""Plans as tables, and hours."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.sweeps.planning.plan_table import plan_as_dict, plan_lines
from megatron_attnres.training.sweeps.planning.throughput import Throughput

THREE_HOURS = 3 * 3600 * 10**12


def planned(size: str, curve: str, flops: int, **flags) -> PlannedRun:
    name = f"{size}-{curve}"
    return PlannedRun(name, size, curve, 0.1, 1, 1_500, 1_000, 64_000, 2_000, flops, flags)


RUNS = [
    planned("a", "full", THREE_HOURS, **{"num-layers": 2, "kv-channels": 8}),
    planned("a", "block8", THREE_HOURS, **{"num-layers": 2, "attn-res-block-size": 4}),
    planned("b", "full", 2 * THREE_HOURS, **{"model-size": "tiny"}),
]


def test_the_table():
    assert list(plan_lines(RUNS, Throughput(1.0, 2))) == [
        "run       parameters  non-embedding  iterations   tokens      FLOPs  PFLOP/s-days  hours",
        "\na: num-layers 2, kv-channels 8",
        "a-full         1,500          1,000       2,000   64,000  1.080e+16      0.000125      3",
        "a-block8       1,500          1,000       2,000   64,000  1.080e+16      0.000125      3",
        "\nb: model-size tiny",
        "b-full         1,500          1,000       2,000   64,000  2.160e+16       0.00025      6",
        "\n3 runs    " + " " * 39 + "192,000  4.320e+16        0.0005      6",
        "note: a block8: its sublayers cannot be cut into as many blocks of equal size; takes "
        "blocks of 4 sublayers",
        "hours at 1 TFLOP/s of each run; in total with 2 runs at a time",
    ]


def test_no_hours_without_a_throughput():
    lines = list(plan_lines(RUNS[2:], None))
    assert lines[0].endswith("PFLOP/s-days")
    assert lines[-1].startswith("\n1 run ")
    assert "hours" not in json.dumps(plan_as_dict(RUNS, None))


def test_the_plan_for_programs():
    plan = json.loads(json.dumps(plan_as_dict(RUNS, Throughput(1.0))))
    assert plan["totals"] == {
        "runs": 3,
        "tokens": 192_000,
        "flops": 4 * THREE_HOURS,
        "pflops_days": 0.0005,
        "hours": 12.0,
    }
    assert plan["runs"][2]["hours"] == 6.0
    assert plan["runs"][2]["flags"] == {"model-size": "tiny"}


@given(st.lists(st.integers(1, 10**20), min_size=1), st.integers(1, 50))
def test_jobs_share_the_hours_but_the_longest_run_takes_its_own(flops, jobs):
    throughput = Throughput(0.5, jobs)
    total, alone = throughput.hours_in_total(flops), Throughput(0.5).hours_in_total(flops)
    assert total >= max(map(throughput.hours, flops))
    assert alone / jobs <= total * (1 + 1e-9)
    assert total <= max(alone / jobs, throughput.hours(max(flops))) * (1 + 1e-9)


@pytest.mark.parametrize("tflops", [0.0, -1.0, float("nan"), float("inf")])
def test_a_throughput_is_above_0(tflops):
    with pytest.raises(InputError, match=r"--tflops .*: must be above 0"):
        Throughput(tflops)
