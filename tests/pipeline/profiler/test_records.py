"""Ranks' records become one timeline: on one clock, every transfer with both its ends."""

import pytest

from megatron_attnres.pipeline.messages import Message
from megatron_attnres.pipeline.profiler.alignment import AlignedClock, ClockReading
from megatron_attnres.pipeline.profiler.records import RankStep, Received, join_ranks
from megatron_attnres.pipeline.timeline.records import ComputeSpan, StageSpan, WaitSpan

FIRST, SECOND = Message("forward", 0, 0), Message("forward", 0, 1)


def rank_step(stage, span=(10.0, 20.0), computes=(), waits=(), sent=None, received=None):
    return RankStep(
        3, 4 + stage, 4, stage, StageSpan(*span), computes, waits, sent or {}, received or {}
    )


def two_stages():
    return [
        rank_step(
            1,
            waits=(WaitSpan(1, "receive", FIRST, "critical", 11.0, 13.0),),
            received={
                (FIRST, "critical"): Received(11.0, 13.0, 8),
                (SECOND, "critical"): Received(11.5, 14.0, 8),
            },
        ),
        rank_step(
            0,
            computes=(ComputeSpan(0, "forward", 0, 0, 10.0, 12.0),),
            sent={(FIRST, "critical"): 12.0, (SECOND, "critical"): 12.5},
        ),
    ]


def test_stages_come_in_order_and_times_from_the_first_start():
    timeline = join_ranks(two_stages())
    assert timeline.ranks == (4, 5)
    assert timeline.iteration == 3
    assert timeline.stages == (StageSpan(0.0, 10.0), StageSpan(0.0, 10.0))
    assert timeline.computes == (ComputeSpan(0, "forward", 0, 0, 0.0, 2.0),)
    assert timeline.waits == (WaitSpan(1, "receive", FIRST, "critical", 1.0, 3.0),)


def test_a_transfer_starts_when_both_ends_posted_and_its_lane_is_free():
    first, second = join_ranks(two_stages()).transfers
    assert (first.send_posted, first.receive_posted, first.started, first.completed) == (2, 1, 2, 3)
    assert (second.started, second.completed) == (3, 4), "the lane was busy until 3"
    assert first.num_bytes == second.num_bytes == 8


def test_another_kind_of_lane_does_not_wait():
    receiver, sender = two_stages()
    sender.sent[FIRST, "relay"] = 12.0
    receiver.received[FIRST, "relay"] = Received(11.0, 12.5, 8)
    relay = next(t for t in join_ranks([receiver, sender]).transfers if t.kind == "relay")
    assert (relay.started, relay.completed) == (2.0, 2.5)


def test_a_message_of_one_end_only_is_refused():
    receiver, sender = two_stages()
    del sender.sent[SECOND, "critical"]
    with pytest.raises(
        ValueError, match="forward hop 0-1 of micro-batch 1, critical lane, was rec"
    ):
        join_ranks([receiver, sender])


def test_a_missing_stage_is_refused():
    with pytest.raises(ValueError, match=r"stages \[1\] are not"):
        join_ranks(two_stages()[:1])


def test_every_time_is_put_on_the_common_clock():
    moved = two_stages()[0].on_clock(lambda time: time + 1)
    assert moved.span == StageSpan(11.0, 21.0)
    assert moved.waits[0][-2:] == (12.0, 14.0)
    assert moved.received[FIRST, "critical"] == Received(12.0, 14.0, 8)


def test_a_clock_that_drifts_is_followed():
    clock = AlignedClock(ClockReading(100.0, 5.0, 1e-5), ClockReading(200.0, 6.0, 3e-5))
    assert clock(100.0) == 105.0
    assert clock(150.0) == 155.5
    assert clock(200.0) == 206.0
    assert clock.error == 3e-5
