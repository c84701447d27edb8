"""Traces keep to the Trace Event Format, and show what the timeline says."""

import json
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given

from megatron_attnres.pipeline.messages import Message
from megatron_attnres.pipeline.timeline.chrome_trace import chrome_trace
from tests.pipeline.timeline.examples import Example, all_timelines, changed

REQUIRED = {
    "X": {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"},
    "M": {"ph", "pid", "tid", "name", "args"},
    "s": {"ph", "pid", "tid", "name", "cat", "id", "ts"},
    "f": {"ph", "pid", "tid", "name", "cat", "id", "ts", "bp"},
}
TYPES = {
    "pid": int,
    "tid": int,
    "id": int,
    "name": str,
    "cat": str,
    "bp": str,
    "ts": float,
    "dur": float,
    "args": dict,
}
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def nanoseconds(event):
    """Start and end, as Perfetto counts them."""
    return round(event["ts"] * 1e3), round(event["ts"] * 1e3) + round(event.get("dur", 0) * 1e3)


def of_phase(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def rows_of(trace):
    rows = defaultdict(list)
    for event in of_phase(trace, "X"):
        rows[event["pid"], event["tid"]].append(event)
    return rows


def check_events(trace):
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert set(event) == REQUIRED[event["ph"]]
        for key, kind in TYPES.items():
            assert key not in event or type(event[key]) is kind, event
        if event["ph"] == "M":
            name, kind = METADATA[event["name"]]
            assert set(event["args"]) == {name}
            assert type(event["args"][name]) is kind
        elif event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "f":
            assert event["bp"] == "e"


def check_nesting(trace):
    """On every row, a slice ends before the next begins or holds all of it."""
    for row in rows_of(trace).values():
        opened = []
        for start, end in sorted(map(nanoseconds, row), key=lambda times: (times[0], -times[1])):
            while opened and opened[-1] <= start:
                opened.pop()
            assert not opened or end <= opened[-1]
            opened.append(end)


def check_flows(trace):
    """Every arrow has one start and one end, each in a slice of its row."""
    rows = rows_of(trace)
    ends = defaultdict(list)
    for event in of_phase(trace, "s") + of_phase(trace, "f"):
        ends[event["id"], event["name"], event["cat"]].append(event)
        time, _ = nanoseconds(event)
        slices = map(nanoseconds, rows[event["pid"], event["tid"]])
        assert any(start <= time <= end for start, end in slices)
    for pair in ends.values():
        assert [event["ph"] for event in pair] == ["s", "f"]
        assert pair[0]["ts"] <= pair[1]["ts"]
    assert len({flow_id for flow_id, _, _ in ends}) == len(ends)


def check_names(trace):
    """Every process and every row with slices has its name and place, once."""
    named = [(event["name"], event["pid"], event["tid"]) for event in of_phase(trace, "M")]
    assert len(named) == len(set(named))
    for pid, tid in rows_of(trace):
        assert {("thread_name", pid, tid), ("thread_sort_index", pid, tid)} <= set(named)
        processes = {(what, process) for what, process, _ in named}
        assert {("process_name", pid), ("process_sort_index", pid)} <= processes


@given(all_timelines())
def test_the_trace_keeps_to_the_format(timelines):
    trace = json.loads(json.dumps(chrome_trace(timelines), allow_nan=False))
    for check in (check_events, check_nesting, check_flows, check_names):
        check(trace)


@given(all_timelines())
def test_nothing_is_lost(timelines):
    trace = chrome_trace(timelines)
    slices = of_phase(trace, "X")
    for category, expected in (
        ("step", sum(len(step.stages) for step in timelines.steps)),
        ("compute", sum(len(step.computes) for step in timelines.steps)),
        ("wait", sum(len(step.waits) for step in timelines.steps)),
        ("transfer", 2 * sum(len(step.transfers) for step in timelines.steps)),
    ):
        assert sum(event["cat"].split(",")[0] == category for event in slices) == expected
    assert len(of_phase(trace, "s")) == sum(len(step.transfers) for step in timelines.steps)


def test_a_step_by_hand():
    example = Example(2, 1, 1, forward=0.25, backward=0.5, transfer=0.125, early_relay=False)
    trace = chrome_trace(example.timelines())
    rows = {
        (event["pid"], event["args"]["name"]): event["tid"]
        for event in of_phase(trace, "M")
        if event["name"] == "thread_name"
    }
    assert sorted(rows) == [
        (0, "compute"),
        (0, "receive critical backward"),
        (0, "send critical forward"),
        (1, "compute"),
        (1, "receive critical forward"),
        (1, "send critical backward"),
    ]
    found = defaultdict(list)
    for event in of_phase(trace, "X"):
        found[event["pid"], event["tid"]].append((event["name"], event["ts"], event["dur"]))
    # Two entries cross: b_0 and the partial sum.
    assert [one for one in found[1, rows[1, "compute"]] if one[0][:4] != "wait"] == [
        ("step 1", 0.0, 1_500_000.0),
        ("F c1 m0", 500_000.0, 250_000.0),
        ("B c1 m0", 750_000.0, 500_000.0),
    ]
    sent = [("backward hop 1-0 of micro-batch 0, critical", 1_250_000.0, 250_000.0)]
    assert found[1, rows[1, "send critical backward"]] == sent
    assert found[0, rows[0, "receive critical backward"]] == sent
    starts = {(event["pid"], event["tid"]) for event in of_phase(trace, "s")}
    assert starts == {(0, rows[0, "send critical forward"]), (1, rows[1, "send critical backward"])}
    waits = [one for one in found[0, rows[0, "compute"]] if one[0][:4] == "wait"]
    assert waits[0] == ("wait backward hop 1-0 of micro-batch 0, critical", 250_000.0, 1_250_000.0)
    transfer = next(event for event in of_phase(trace, "X") if event["name"] == sent[0][0])
    assert transfer["args"] == {
        "bytes": 2000,
        "MB/s": 0.008,
        "send posted ms": 1250.0,
        "receive posted ms": 0.0,
    }


def test_processes_are_ranks_by_pipeline_and_stage():
    trace = chrome_trace(Example(2, 1, 1).timelines(pipelines=2))
    names, order = (
        {event["pid"]: event["args"] for event in of_phase(trace, "M") if event["name"] == what}
        for what in ("process_name", "process_sort_index")
    )
    assert sorted(names, key=lambda rank: order[rank]["sort_index"]) == [0, 2, 1, 3]
    assert names[2] == {"name": "rank 2 (stage 1)"}


def steps_of(trace):
    return [event for event in of_phase(trace, "X") if event["cat"] == "step"]


def test_iterations_follow_one_another_and_pipelines_start_together():
    timelines = Example(2, 1, 2, jitter=0.5, begin=5.0).timelines(iterations=3, pipelines=2)
    times = defaultdict(list)
    for event in steps_of(chrome_trace(timelines)):
        times[event["name"], event["pid"] % 2].append(nanoseconds(event))
    previous_end = -1
    for iteration in (1, 2, 3):
        pipelines = [times[f"step {iteration}", pipeline] for pipeline in (0, 1)]
        starts = {min(start for start, _ in stages) for stages in pipelines}
        assert len(starts) == 1
        assert starts.pop() > previous_end
        previous_end = max(end for stages in pipelines for _, end in stages)


def test_simulated_steps_of_the_same_ranks_follow_one_another():
    timelines = Example(2, 1, 2).timelines()
    twice = replace(timelines, steps=timelines.steps * 2)
    first, _, second, _ = steps_of(chrome_trace(twice))
    assert nanoseconds(second)[0] > nanoseconds(first)[1]


def test_transfers_that_clocks_let_overlap_are_clipped():
    timelines = Example(2, 1, 2, early_relay=False, transfer=0.1).timelines()
    step = timelines.steps[0]
    forwards = [i for i, one in enumerate(step.transfers) if one.message.direction == "forward"]
    early = step.transfers[forwards[0]].completed - 1e-4
    step = changed(step, "transfers", forwards[1], started=early)
    trace = chrome_trace(replace(timelines, steps=(step,)))
    check_nesting(trace)
    first, second = (
        next(event for event in of_phase(trace, "X") if event["name"] == f"{message}, critical")
        for message in (Message("forward", 0, 0), Message("forward", 0, 1))
    )
    assert nanoseconds(second)[0] == nanoseconds(first)[1]
    assert nanoseconds(second)[1] == round(step.transfers[forwards[1]].completed * 1e9)


def test_edges_that_rounding_let_overlap_are_clipped():
    timelines = Example(1, 1, 1).timelines()
    step = timelines.steps[0]
    backward = changed(step, "computes", 1, start=step.computes[0].end - 1e-9)
    beyond = changed(backward, "computes", 1, end=step.end + 1e-9)
    check_nesting(chrome_trace(replace(timelines, steps=(beyond,))))


def test_a_wait_inside_a_forward_is_nested_in_it():
    trace = chrome_trace(Example(4, 1, 2, transfer=0.1).timelines())
    slices = [event for event in of_phase(trace, "X") if event["pid"] == 3]
    relayed = [event for event in slices if event["cat"] == "wait,relay,forward,receive"]
    waits = [event for event in relayed if event["dur"] > 0]
    computes = [nanoseconds(event) for event in slices if event["cat"].startswith("compute")]
    assert waits
    for start, end in map(nanoseconds, waits):
        assert any(outer[0] <= start and end <= outer[1] for outer in computes)


def test_a_wait_without_its_transfer_is_refused():
    timelines = Example().timelines()
    step = replace(timelines.steps[0], transfers=())
    with pytest.raises(ValueError, match="has no transfer"):
        chrome_trace(replace(timelines, steps=(step,)))
