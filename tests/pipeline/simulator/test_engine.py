"""The engine against closed forms, to the last digit: times are fractions."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_attnres.pipeline.messages import Message
from megatron_attnres.pipeline.simulator.engine import Simulation
from megatron_attnres.pipeline.simulator.network import Link, Network
from megatron_attnres.pipeline.simulator.operations import Operation
from megatron_attnres.pipeline.simulator.workload import Payload, predict, predict_seconds
from tests.pipeline.simulator.workloads import even_workload, network, workloads

STANDARD = Payload(None)
FIRST, SECOND = Message("forward", 0, 0), Message("forward", 0, 1)
TIMES = st.integers(1, 50).map(lambda number: Fraction(number, 7))


def play(programs, links, num_bytes=lambda message, kind: 1):
    """Transfers by message and lane; a computation takes 1."""
    timeline = Simulation(programs, links, lambda direction, chunk: Fraction(1), num_bytes).run()
    return timeline, {(one.message, one.kind): one for one in timeline.transfers}


def sends(*lanes):
    return [Operation("send", message, kind) for message, kind in lanes]


def receives(*lanes):
    posts = [Operation("post", message, kind) for message, kind in lanes]
    return posts + [Operation("wait", message, kind) for message, kind in lanes]


@settings(max_examples=60)
@given(
    pipeline=st.integers(2, 6),
    virtual=st.integers(1, 4),
    groups=st.integers(1, 4),
    forward=TIMES,
    backward=TIMES,
    overlap=st.booleans(),
)
def test_without_communication_the_bubble_is_the_schedules(
    pipeline, virtual, groups, forward, backward, overlap
):
    microbatches = groups * pipeline
    workload = even_workload(pipeline, virtual, microbatches, forward, backward, overlap=overlap)
    timeline = predict(workload, STANDARD, network(pipeline))
    slots = microbatches * virtual
    assert timeline.seconds == (slots + pipeline - 1) * (forward + backward)
    computed = sum(span.end - span.start for span in timeline.computes) / pipeline
    assert 1 - computed / timeline.seconds == Fraction(pipeline - 1, slots + pipeline - 1)


@given(pipeline=st.integers(2, 6), microbatches=st.integers(1, 9), forward=TIMES, backward=TIMES)
def test_one_f_one_b_takes_any_number_of_micro_batches(pipeline, microbatches, forward, backward):
    workload = even_workload(pipeline, 1, microbatches, forward, backward)
    seconds = predict_seconds(workload, STANDARD, network(pipeline))
    assert seconds == (microbatches + pipeline - 1) * (forward + backward)


@given(
    pipeline=st.integers(2, 5),
    forward=TIMES,
    backward=TIMES,
    entry_bytes=st.integers(1, 9),
    latency=TIMES,
)
def test_one_micro_batch_pays_every_hop_both_ways(
    pipeline, forward, backward, entry_bytes, latency
):
    workload = even_workload(pipeline, 1, 1, forward, backward, entry_bytes)
    seconds = predict_seconds(workload, STANDARD, network(pipeline, 3, latency))
    transfer = Fraction(entry_bytes, 3) + latency
    assert seconds == pipeline * (forward + backward) + 2 * (pipeline - 1) * transfer


@given(example=workloads())
def test_the_step_without_its_timeline_is_the_same(example):
    workload, payload = example
    links = network(workload.schedule.pipeline_size, 2, Fraction(1, 3))
    assert predict_seconds(workload, payload, links) == predict(workload, payload, links).seconds


@pytest.mark.parametrize(("shared", "seconds"), [(True, 2), (False, 1)])
def test_two_lanes_of_one_rank_share_its_link(shared, seconds):
    lanes = (FIRST, "critical"), (FIRST, "relay")
    timeline, transfers = play([sends(*lanes), receives(*lanes)], network(2, shared=shared))
    assert timeline.seconds == seconds
    assert [transfers[lane].completed for lane in lanes] == [seconds, seconds]


def test_a_share_grows_when_another_transfer_ends():
    lanes = (FIRST, "critical"), (FIRST, "relay")
    _, transfers = play(
        [sends(*lanes), receives(*lanes)],
        network(2),
        lambda message, kind: {"critical": 1, "relay": 3}[kind],
    )
    # Half the rate each until 2; then the other's last 2 bytes alone.
    assert [transfers[lane].completed for lane in lanes] == [2, 4]


def test_a_share_shrinks_when_another_transfer_starts():
    late = Operation("compute", Message("forward", 0, 0))
    program = [*sends((FIRST, "critical")), late, *sends((FIRST, "relay"))]
    lanes = (FIRST, "critical"), (FIRST, "relay")
    _, transfers = play([program, receives(*lanes)], network(2), lambda message, kind: 2)
    # One byte alone, then both at half: the first ends at 3, the other has 1 byte left.
    assert [transfers[lane].completed for lane in lanes] == [3, 4]


def test_a_link_inside_a_node_is_not_one_between_nodes():
    upstream, downstream = Message("backward", 0, 0), Message("forward", 1, 0)
    programs = [
        receives((upstream, "critical")),
        sends((upstream, "critical"), (downstream, "critical")),
        receives((downstream, "critical")),
    ]
    link = Link(Fraction(1), Fraction(0))
    same = Network(link, link, (0, 0, 0))
    apart = Network(link, Link(Fraction(1, 5), Fraction(0)), (0, 0, 1))
    assert play(programs, same)[0].seconds == 2
    _, transfers = play(programs, apart)
    assert transfers[upstream, "critical"].completed == 1
    assert transfers[downstream, "critical"].completed == 5


def test_transfers_that_reach_one_rank_share_its_link():
    from_first, from_last = Message("forward", 0, 0), Message("backward", 1, 0)
    programs = [
        sends((from_first, "critical")),
        receives((from_first, "critical"), (from_last, "critical")),
        sends((from_last, "critical")),
    ]
    assert play(programs, network(3))[0].seconds == 2


def test_sending_and_receiving_do_not_share():
    there, back = Message("forward", 0, 0), Message("backward", 0, 0)
    programs = [
        [*sends((there, "critical")), *receives((back, "critical"))],
        [*sends((back, "critical")), *receives((there, "critical"))],
    ]
    assert play(programs, network(2))[0].seconds == 1


def test_a_lane_carries_its_messages_in_turn():
    lanes = (FIRST, "critical"), (SECOND, "critical")
    _, transfers = play([sends(*lanes), receives(*lanes)], network(2))
    assert [(transfers[lane].started, transfers[lane].completed) for lane in lanes] == [
        (0, 1),
        (1, 2),
    ]


def test_latency_adds_once_and_does_not_hold_the_lane():
    lanes = (FIRST, "critical"), (SECOND, "critical")
    _, transfers = play([sends(*lanes), receives(*lanes)], network(2, latency=10))
    assert [transfers[lane].completed for lane in lanes] == [11, 12]


def test_a_transfer_starts_when_both_ends_have_posted_it():
    busy = Operation("compute", Message("forward", 1, 0))
    lane = FIRST, "critical"
    timeline, transfers = play([sends(lane), [busy, *receives(lane)]], network(2))
    span = transfers[lane]
    assert (span.send_posted, span.receive_posted, span.started, span.completed) == (0, 1, 1, 2)
    assert [(wait.stage, wait.side, wait.start, wait.end) for wait in sorted(timeline.waits)] == [
        (0, "send", 0, 2),
        (1, "receive", 1, 2),
    ]


def test_a_stage_does_not_wait_for_its_sends_until_it_ends():
    lane = FIRST, "critical"
    compute = Operation("compute", Message("forward", 0, 1))
    timeline, _ = play([[*sends(lane), compute], receives(lane)], network(2, Fraction(1, 3)))
    (span,) = timeline.computes
    assert (span.start, span.end) == (0, 1)
    assert timeline.stages[0].end == 3


@pytest.mark.parametrize(
    "programs",
    [
        [[], receives((FIRST, "critical"))],
        [sends((FIRST, "critical")), []],
        [
            [*receives((Message("backward", 0, 0), "critical")), *sends((FIRST, "critical"))],
            [*receives((FIRST, "critical")), *sends((Message("backward", 0, 0), "critical"))],
        ],
    ],
    ids=["never sent", "never received", "each waits for the other"],
)
def test_stages_that_wait_for_ever_are_named(programs):
    with pytest.raises(RuntimeError, match=r"stage \d waits for ever for .* hop .* critical lane"):
        play(programs, network(2))
