"""Reports: planned bytes beside measured ones, medians over steps, tables for a terminal."""

import json
from dataclasses import replace

from hypothesis import given

from megatron_attnres.pipeline.plan import total_entries
from megatron_attnres.pipeline.timeline.report import (
    planned_bytes,
    report_table,
    timelines_report,
)
from tests.pipeline.timeline.examples import (
    ENTRY_BYTES,
    Example,
    all_timelines,
    changed,
    examples,
)


@given(all_timelines())
def test_the_report_is_json_and_bytes_are_as_planned(timelines):
    report = timelines_report(timelines)
    assert report["bytes_as_planned"]
    read = json.loads(json.dumps(report, allow_nan=False))
    assert [step["iteration"] for step in read["steps"]] == [s.iteration for s in timelines.steps]
    for step, original in zip(read["steps"], timelines.steps, strict=True):
        assert sum(hop["num_bytes"] for hop in step["hops"]) == sum(
            transfer.num_bytes for transfer in original.transfers
        )
        assert len(step["stages"]) == timelines.layout.pipeline_size


@given(examples())
def test_both_directions_carry_all_entries_of_the_plan(example):
    planned = planned_bytes(example.layout)
    one_way = total_entries(example.layout.plan.hops) * example.microbatches * ENTRY_BYTES
    for direction in ("forward", "backward"):
        assert sum(size for lane, size in planned.items() if lane[1] == direction) == one_way
    if not example.early_relay:
        assert {kind for _, _, kind in planned} <= {"critical"}


def test_planned_bytes_by_hand():
    # Blocks end with every second chunk of one layer: hop 1-2 makes b_1 and relays b_0.
    planned = planned_bytes(Example(4, 1, 3, block_size=4).layout)
    assert planned[0, "forward", "critical"] == 2 * 3 * ENTRY_BYTES
    assert (0, "forward", "relay") not in planned
    assert planned[1, "backward", "critical"] == 1 * 3 * ENTRY_BYTES
    assert planned[1, "backward", "relay"] == 1 * 3 * ENTRY_BYTES


def test_other_bytes_than_planned_are_told():
    timelines = Example().timelines(2)
    step = timelines.steps[1]
    size = step.transfers[0].num_bytes
    wrong = changed(step, "transfers", 0, num_bytes=size + 1)
    report = timelines_report(replace(timelines, steps=(timelines.steps[0], wrong)))
    assert [step["bytes_as_planned"] for step in report["steps"]] == [True, False]
    assert not report["bytes_as_planned"]
    assert "bytes are NOT as planned" in report_table(replace(timelines, steps=(wrong,)))


def test_what_is_planned_and_does_not_cross_has_zeros():
    timelines = Example(2, 1, 2).timelines()
    silent = replace(timelines.steps[0], transfers=(), waits=())
    report = timelines_report(replace(timelines, steps=(silent,)))
    assert not report["bytes_as_planned"]
    hops = report["steps"][0]["hops"]
    assert [hop["direction"] for hop in hops] == ["forward", "backward"]
    assert {hop["num_bytes"] for hop in hops} == {0}
    assert all(hop["planned_bytes"] > 0 for hop in hops)


def test_what_crosses_unplanned_is_told():
    timelines = Example(early_relay=True, pipeline=4, virtual=1).timelines()
    layout = replace(timelines.layout, early_relay=False)
    hops = timelines_report(replace(timelines, layout=layout))["steps"][0]["hops"]
    relayed = [hop for hop in hops if hop["kind"] == "relay"]
    assert relayed
    assert {hop["planned_bytes"] for hop in relayed} == {0}


def _three_steps():
    """Of 90, 30 and 40 ms of compute, one stage, nothing else."""
    steps = [
        Example(1, 1, 1, forward=seconds / 3, backward=seconds / 3 * 2).step(iteration=i + 1)
        for i, seconds in enumerate((0.09, 0.03, 0.04))
    ]
    return replace(Example(1, 1, 1).timelines(), steps=tuple(steps))


def test_the_summary_takes_the_median_step():
    summary = timelines_report(_three_steps())["summary"]
    assert round(summary["seconds"], 9) == 0.04
    assert round(summary["compute_share"], 9) == 1.0
    assert summary["bubble_share"] == 0.0


def test_a_table_of_one_stage():
    lines = report_table(_three_steps()).splitlines()
    assert lines[0] == ("P 1, V 1, 1 micro-batches, cached, early relay; 3 steps of 1 pipeline")
    assert lines[1].startswith("step time 40.00 ms: compute 100.0%, bubble 0.0%")
    assert lines[-1].split() == ["0", "0", "40.00", "(100.0%)", *["0.00", "(0.0%)"] * 4]


def test_a_table_names_hops_in_their_direction_and_ranks_of_all_pipelines():
    table = report_table(Example(4, 2, 4, early_relay=True).timelines(2, 2, clock_error=2e-5))
    rows = [line.split() for line in table.splitlines()]
    assert ["1-2", "forward", "relay"] in [row[:3] for row in rows]
    relayed = next(row for row in rows if row[:3] == ["2-1", "backward", "relay"])
    # 4 micro-batches of one entry of 1000 bytes, 1 ms each.
    assert relayed[3:7] == ["4", "4,000", "4,000", "4.000"]
    assert relayed[8] == "1.0"
    ranks = [row[:2] for row in rows if row and row[0].isdigit()]
    assert ranks == [[str(rank), str(rank // 2)] for rank in range(8)]
    assert "clocks of two ranks may differ by 0.020 ms" in table
    assert "4 steps of 2 pipelines" in table


def test_a_step_that_took_no_time_has_a_table():
    nothing = Example(1, 1, 1, forward=0.0, backward=0.0).timelines()
    assert "step time 0.00 ms: compute 0.0%" in report_table(nothing)
