"""Predictions of whole steps: what crosses, how long it takes, what is held."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings

from megatron_attnres.pipeline.simulator.network import free_network
from megatron_attnres.pipeline.simulator.workload import (
    Payload,
    peak_summary_entries,
    predict,
    predict_seconds,
)
from megatron_attnres.pipeline.timeline.parts import stage_parts
from tests.pipeline.simulator.workloads import even_workload, network, workloads


@given(example=workloads())
def test_every_hop_carries_what_is_planned(example):
    workload, payload = example
    timeline = predict(workload, payload, network(workload.schedule.pipeline_size))
    sent, messages = Counter(), defaultdict(set)
    for one in timeline.transfers:
        sent[one.message.hop, one.message.direction, one.kind] += one.num_bytes
        messages[one.message.hop, one.message.direction].add(one.message.microbatch)
    microbatches = workload.schedule.num_microbatches
    expected = Counter()
    for hop in workload.plan(payload).hops:
        relayed = len(hop.relayed) if payload.early_relay else 0
        for direction in ("forward", "backward"):
            for kind, entries in (("relay", relayed), ("critical", hop.entries - relayed)):
                expected[hop.index, direction, kind] += (
                    entries * microbatches * workload.entry_bytes
                )
            assert messages[hop.index, direction] == set(range(microbatches))
    assert +sent == +expected


@given(example=workloads())
def test_a_stage_is_always_accounted_for(example):
    workload, payload = example
    size = workload.schedule.pipeline_size
    timeline = predict(workload, payload, network(size, 3))
    per_stage = Counter()
    for chunk in range(len(workload.layers_per_chunk)):
        both = workload.forward_seconds[chunk] + workload.backward_seconds[chunk]
        per_stage[chunk % size] += both * workload.schedule.num_microbatches
    for parts in stage_parts(timeline, size):
        assert parts.compute == per_stage[parts.stage]
        total = parts.compute + parts.bubble + parts.exposed + parts.host + parts.idle
        assert total == pytest.approx(timeline.seconds)
        assert parts.host == 0


@settings(max_examples=60)
@given(example=workloads())
def test_what_arrives_earlier_never_makes_a_step_longer(example):
    """On lanes that share nothing; where they share a link it can, and does."""
    workload, payload = example
    links = network(workload.schedule.pipeline_size, 2, shared=False)
    free = free_network(workload.schedule.pipeline_size)

    def seconds(policy, early_relay):
        other = payload._replace(policy=policy, early_relay=early_relay)
        return predict_seconds(workload, other, links)

    assert seconds("naive", True) <= seconds("naive", False)
    assert seconds("cached", True) <= seconds("cached", False)
    assert seconds("cached", False) <= seconds("naive", False)
    assert seconds("cached", True) >= predict(workload, Payload(None), free).seconds


FIGURE_3 = {  # hop: sources, and whether the partial sum crosses
    0: ((0,), True),
    1: ((0, 1), False),
    2: ((0, 1), True),
    3: ((1, 2), False),
    4: ((2,), True),
    5: ((2, 3), False),
    6: ((3,), True),
}


@pytest.mark.parametrize("early_relay", [False, True])
def test_the_papers_figure_3(early_relay):
    """Four ranks, two virtual stages, blocks of two chunks; a chunk is a layer."""
    workload = even_workload(4, 2, 4, 1, 2, entry_bytes=10)
    payload = Payload(4, "cached", early_relay)
    plan = workload.plan(payload)
    assert {hop.index: (hop.sources, hop.partial) for hop in plan.hops} == FIGURE_3
    carried = Counter()
    for one in predict(workload, payload, network(4, 1000)).transfers:
        carried[one.message] += one.num_bytes
    for (_, hop, _), num_bytes in carried.items():
        sources, partial = FIGURE_3[hop]
        assert num_bytes == 10 * (len(sources) + partial)
    assert len(carried) == 2 * len(FIGURE_3) * 4


def test_held_entries_by_hand():
    """Chunk 0 makes b0 and b1, chunk 1 receives them and makes b2; a layer is a block."""
    workload = even_workload(2, 1, 4, 1, 2)
    # Rank 0 runs two forwards before its first backward, rank 1 one.
    assert peak_summary_entries(workload, Payload(2)) == 2 * 2
    assert peak_summary_entries(even_workload(2, 1, 1, 1, 2), Payload(2)) == 2 + 1
    # With standard residuals rank 1 holds one micro-batch's hidden state, rank 0 its own input.
    assert peak_summary_entries(workload, Payload(None)) == 1


def test_cached_reads_are_held_once():
    """Naive hops bring to chunks 2 and 3 what their ranks hold already."""
    workload = even_workload(2, 2, 2, 1, 2)
    # Rank 0 runs all four forwards first: chunk 0 makes b0 b1; chunk 2 receives b0 b1 b2, or b2
    # alone, and makes b3. Rank 1 holds at most both micro-batches of chunk 1 (b0 b1 and b2) and one
    # of chunk 3 (b0 to b3, or b3 alone, and b4).
    assert peak_summary_entries(workload, Payload(2, "naive")) == max(2 * (2 + 4), 2 * 3 + 5)
    assert peak_summary_entries(workload, Payload(2, "cached")) == max(2 * (2 + 2), 2 * 3 + 2)
