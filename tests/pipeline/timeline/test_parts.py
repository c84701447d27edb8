"""Parts of a stage's time add up, mean what they say, and spans that cannot be are refused."""

from dataclasses import replace

import pytest
from hypothesis import given

from megatron_attnres.pipeline.messages import Message
from megatron_attnres.pipeline.timeline.parts import HopTotals, hop_totals, stage_parts
from megatron_attnres.pipeline.timeline.records import (
    ComputeSpan,
    StageSpan,
    StepTimeline,
    TransferSpan,
    WaitSpan,
)
from tests.pipeline.timeline.examples import Example, changed, examples

ACTIVATION, GRADIENT = Message("forward", 0, 0), Message("backward", 0, 0)

# Stage 1 posts its receive late, and hands its gradient over late: binary fractions add exactly.
BY_HAND = StepTimeline(
    iteration=1,
    ranks=(4, 7),
    stages=(StageSpan(0.0, 8.0), StageSpan(0.5, 7.0)),
    computes=(
        ComputeSpan(0, "forward", 0, 0, 0.25, 1.0),
        ComputeSpan(1, "forward", 1, 0, 2.5, 3.5),
        ComputeSpan(1, "backward", 1, 0, 3.5, 5.5),
        ComputeSpan(0, "backward", 0, 0, 6.5, 8.0),
    ),
    waits=(
        WaitSpan(0, "send", ACTIVATION, "critical", 1.0, 2.0),
        WaitSpan(0, "receive", GRADIENT, "critical", 2.25, 6.5),
        WaitSpan(1, "receive", ACTIVATION, "critical", 1.5, 2.0),
        WaitSpan(1, "send", GRADIENT, "critical", 5.75, 6.5),
    ),
    transfers=(
        TransferSpan(ACTIVATION, "critical", 100, 1.0, 1.5, 1.5, 2.0),
        TransferSpan(GRADIENT, "critical", 200, 5.5, 2.25, 5.5, 6.5),
    ),
)


@given(examples())
def test_parts_add_up_to_the_step_time(example):
    step = example.step()
    for stage, parts in enumerate(stage_parts(step, example.pipeline)):
        found = (parts.compute, parts.bubble, parts.exposed, parts.host, parts.idle)
        assert min(found) >= -1e-12
        assert sum(found) == pytest.approx(parts.seconds, rel=1e-9, abs=1e-12)
        assert (parts.stage, parts.rank, parts.seconds) == (stage, step.ranks[stage], step.seconds)


@given(examples())
def test_compute_is_what_forwards_and_backwards_take_without_their_waits(example):
    example = replace(example, jitter=0.0)
    a_microbatch = example.virtual * (example.forward + example.backward)
    for parts in stage_parts(example.step(), example.pipeline):
        expected = example.microbatches * a_microbatch
        assert parts.compute == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(examples())
def test_what_stages_saw_exposed_is_what_hops_exposed(example):
    step = example.step()
    by_stage = sum(parts.exposed for parts in stage_parts(step, example.pipeline))
    by_hop = sum(total.exposed_seconds for total in hop_totals(step, example.pipeline))
    assert by_hop == pytest.approx(by_stage, rel=1e-9, abs=1e-12)


def test_parts_by_hand():
    first, second = stage_parts(BY_HAND, 2)
    # 1 to 1.5 until stage 1 posts, 2.25 to 5.5 until it has the gradient.
    assert (first.compute, first.bubble, first.exposed) == (2.25, 0.5 + 3.25, 0.5 + 1.0)
    assert (first.host, first.idle, first.seconds) == (0.25 + 0.25, 0.0, 8.0)
    assert (second.compute, second.bubble, second.exposed) == (3.0, 0.0, 0.5 + 0.75)
    assert (second.host, second.idle) == (1.0 + 0.5 + 0.25 + 0.5, 0.5 + 1.0)
    assert (first.rank, second.rank) == (4, 7)


def test_a_wait_inside_a_forward_is_no_compute():
    before = stage_parts(BY_HAND, 2)[1]
    relayed = WaitSpan(1, "receive", ACTIVATION, "relay", 2.5, 3.0)
    transfer = TransferSpan(ACTIVATION, "relay", 50, 2.75, 1.5, 2.75, 3.0)
    step = replace(
        BY_HAND, waits=(*BY_HAND.waits, relayed), transfers=(*BY_HAND.transfers, transfer)
    )
    after = stage_parts(step, 2)[1]
    assert after.compute == before.compute - 0.5
    assert (after.bubble, after.exposed) == (before.bubble + 0.25, before.exposed + 0.25)
    assert (after.host, after.idle) == (before.host, before.idle)


def test_queueing_behind_another_transfer_is_exposed():
    step = changed(BY_HAND, "transfers", 1, send_posted=3.0)
    assert stage_parts(step, 2)[0].exposed == 0.5 + 3.5


def test_totals_by_hand():
    forward, backward = hop_totals(BY_HAND, 2)
    assert forward == HopTotals(0, "forward", "critical", 1, 100, 0.5, 0.5 + 0.5)
    assert backward == HopTotals(0, "backward", "critical", 1, 200, 1.0, 1.0 + 0.75)
    assert (forward.bytes_per_second, backward.bytes_per_second) == (200.0, 200.0)


def test_a_transfer_that_takes_no_time_has_no_rate():
    step = changed(BY_HAND, "transfers", 0, started=2.0)
    assert hop_totals(step, 2)[0].bytes_per_second is None


def test_totals_come_by_hop_then_direction_then_kind():
    totals = hop_totals(Example(4, 2, 4).step(), 4)
    found = [(total.hop, total.direction, total.kind) for total in totals]
    assert found[:6] == [
        (0, "forward", "critical"),
        (0, "backward", "critical"),
        (1, "forward", "critical"),
        (1, "forward", "relay"),
        (1, "backward", "critical"),
        (1, "backward", "relay"),
    ]
    assert [hop for hop, _, _ in found] == sorted(hop for hop, _, _ in found)
    assert {total.messages for total in totals} == {4}


@pytest.mark.parametrize(
    ("records", "index", "fields", "said"),
    [
        ("computes", 2, {"start": 3.25}, "forward of chunk 1 for micro-batch 0, .* overlaps"),
        ("waits", 1, {"end": 6.75}, "wait for backward hop 1-0 .* crosses the edge"),
        ("waits", 0, {"start": 0.75}, "stage 0: wait for forward hop 0-1 .* crosses the edge"),
        ("waits", 1, {"start": 1.75}, "forward hop 0-1 .* overlaps .* backward hop 1-0"),
        ("waits", 3, {"end": 7.5}, "wait for backward hop 1-0 .* lies outside the stage's own"),
        ("computes", 0, {"start": -1.0}, "forward of chunk 0 .* lies outside"),
        ("waits", 2, {"kind": "relay"}, "micro-batch 0, relay, .* has no transfer"),
        ("waits", 2, {"stage": 0}, "is not where that message's receive is"),
        ("transfers", 0, {"message": GRADIENT}, "backward hop 1-0 .* is transferred twice"),
    ],
)
def test_spans_that_cannot_be_are_refused(records, index, fields, said):
    with pytest.raises(ValueError, match=said):
        stage_parts(changed(BY_HAND, records, index, **fields), 2)


def test_rounding_is_no_overlap():
    step = changed(BY_HAND, "computes", 2, start=3.5 - 5e-10)
    step = changed(step, "waits", 3, start=5.5 - 5e-10)
    assert stage_parts(step, 2)[1].host == pytest.approx(2.0)
