"""Rows of the comparison and the sweep, against what they are made of."""

import os
from dataclasses import replace

import pytest

from megatron_attnres.analysis.predictions import comparison, outcomes, sweep
from megatron_attnres.analysis.predictions.assumptions import Assumptions
from megatron_attnres.analysis.predictions.compute_times import LayerTimes
from megatron_attnres.analysis.predictions.scenario import Scenario
from megatron_attnres.analysis.predictions.sizes import size_text
from megatron_attnres.analysis.predictions.sweep_picture import draw_sweep
from megatron_attnres.analysis.predictions.variants import variants
from megatron_attnres.errors import InputError
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.pipeline.simulator.network import Link, Network

NODES = Link(1e9, 1e-5)
SCENARIO = Scenario(
    layout=ParallelLayout(tensor=2, pipeline=4, virtual_pipeline=2, data=3),
    num_layers=8,
    block_size=4,
    num_microbatches=8,
    microbatch_group_size=4,
    overlap_p2p=True,
    times=LayerTimes(0.01, 0.02),
    entry_bytes=1_000_000,
    network=Network(NODES, NODES, (0, 1, 2, 3)),
    tokens_per_microbatch=100,
    assumptions=Assumptions(),
)


@pytest.fixture(scope="module")
def rows():
    return comparison.compare(SCENARIO, ("block", "full"))


def test_standard_residuals_and_four_ways_in_each_mode(rows):
    assert [(row.mode, row.policy, row.early_relay) for row in rows] == [
        ("baseline", None, False),
        *(
            (mode, policy, relay)
            for mode in ("block", "full")
            for policy in ("naive", "cached")
            for relay in (False, True)
        ),
    ]


def test_entries_are_those_of_the_plan(rows):
    """DESIGN's first row: 8 layers, S = 4, P = 4, V = 2."""
    assert [row.entries for row in rows[:5]] == [7, 23, 23, 15, 15]
    assert [row.largest_hop for row in rows[:5]] == [1, 5, 5, 3, 3]
    assert all(row.bytes_per_step == 2 * row.entries * 8 * 1_000_000 for row in rows)


def test_times_belong_together(rows):
    standard = rows[0].step_seconds
    free = (8 * 2 + 3) * 0.03
    for row in rows:
        assert row.overhead == pytest.approx(row.step_seconds / standard - 1)
        assert row.exposed_seconds == pytest.approx(row.step_seconds - free)
        assert row.bubble_fraction == pytest.approx(3 / 19)
        assert row.tokens_per_second == pytest.approx(100 * 8 * 3 / row.step_seconds)
    assert rows[0].overhead == 0
    by_way = {(row.mode, row.policy, row.early_relay): row.step_seconds for row in rows}
    assert by_way["block", "cached", True] < by_way["block", "naive", False]
    assert by_way["full", "naive", False] > by_way["block", "naive", False]


def test_depth_attention_is_paid_where_it_is_used():
    times = LayerTimes(0.01, 0.02, depth_attention_share=0.5)
    network = Network(Link(1e15, 0.0), Link(1e15, 0.0), (0,) * 4)
    rows = comparison.compare(replace(SCENARIO, times=times, network=network), ("block",))
    assert all(row.overhead == pytest.approx(0.5) for row in rows[1:])
    assert all(row.exposed_seconds == pytest.approx(0, abs=1e-6) for row in rows)


def test_several_processes_find_what_one_does(rows, monkeypatch):
    monkeypatch.setattr(outcomes, "_FEW", 0)
    assert comparison.compare(SCENARIO, ("block", "full")) == rows


def die(index):
    os._exit(9)


def test_a_process_that_is_killed_is_said_and_not_waited_for(monkeypatch):
    monkeypatch.setattr(outcomes, "_FEW", 0)
    monkeypatch.setattr(outcomes, "_outcome_of_index", die)
    with pytest.raises(InputError, match="a process that predicted steps was killed"):
        comparison.compare(SCENARIO, ("block",))


def test_a_schedule_that_megatron_core_refuses_is_bad_input():
    with pytest.raises(InputError) as caught:
        comparison.compare(replace(SCENARIO, num_microbatches=6), ("block",))
    message = str(caught.value)
    assert "--num-microbatches 6" in message
    assert "--microbatch-group-size-per-virtual-pipeline-stage 4" in message
    assert len(message.splitlines()) == 1


def test_the_table_has_a_line_per_row(rows):
    text = comparison.as_table(rows)
    assert all(f"\n{row.name} " in text for row in rows)
    without_tokens = [replace(row, tokens_per_second=None) for row in rows]
    assert "tokens/s" in text
    assert "tokens/s" not in comparison.as_table(without_tokens)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (3 * 2**20 + 2**19, "3.50 MiB"),
        (686 * 2**30, "686 GiB"),
        (5000 * 2**40, "5,000 TiB"),
    ],
)
def test_bytes_for_people(num_bytes, text):
    assert size_text(num_bytes) == text


@pytest.fixture(scope="module")
def points():
    return sweep.sweep(variants(SCENARIO, (1, 2), (8, 4, 1)))


def test_a_sweep_is_the_comparison_at_every_cell(rows, points):
    cells = [(point.virtual_size, point.num_blocks, point.policy) for point in points]
    assert cells == [
        (virtual, blocks, policy)
        for policy in (sweep.CACHED_EARLY_RELAY, sweep.NAIVE)
        for virtual in (1, 2)
        for blocks in (2, 4, 16)
    ]
    by_cell = dict(zip(cells, points, strict=True))
    for policy, row in ((sweep.NAIVE, rows[1]), (sweep.CACHED_EARLY_RELAY, rows[4])):
        point = by_cell[2, 4, policy]
        assert point.step_seconds == row.step_seconds
        assert point.overhead == row.overhead
        assert point.peak_summary_bytes == row.peak_summary_bytes
        assert point.standard_seconds == rows[0].step_seconds


def test_a_sweep_is_drawn(points, tmp_path):
    draw_sweep(points, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    nothing_lost = [replace(point, overhead=0.0) for point in points]
    draw_sweep(nothing_lost, tmp_path / "flat.png")
