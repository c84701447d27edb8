"""The messages that a rank expects are those that its neighbour and Megatron-Core's schedule have.

The replay (replay.py) runs Megatron-Core's schedules and our chunk edges rank by rank.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules

from megatron_attnres.pipeline.messages import (
    Message,
    backward_receives,
    backward_sends,
    forward_receives,
    forward_sends,
)
from tests.pipeline.orders import Layout, layouts, posting_order, run_to_the_end
from tests.pipeline.replay import Replay, replay


@given(layouts())
def test_every_hop_crosses_once_a_microbatch_and_direction(layout):
    plan, table = layout.plan(), layout.table()
    for direction, sends, receives in (
        ("forward", forward_sends, forward_receives),
        ("backward", backward_sends, backward_receives),
    ):
        expected = {
            Message(direction, hop, microbatch): 1
            for hop in range(layout.chunks - 1)
            for microbatch in range(layout.microbatches)
        }
        for listed in (sends, receives):
            ranks = range(layout.pipeline)
            assert Counter(m for rank in ranks for m in listed(plan, rank, table)) == expected


@given(layouts())
def test_both_ends_of_an_edge_list_the_same_order(layout):
    plan, table = layout.plan(), layout.table()
    for rank in range(layout.pipeline):
        downstream = (rank + 1) % layout.pipeline
        sent = forward_sends(plan, rank, table)
        assert sent == forward_receives(plan, downstream, table)
        assert {message.hop % layout.pipeline for message in sent} <= {rank}
        sent = backward_sends(plan, downstream, table)
        assert sent == backward_receives(plan, rank, table)
        assert {message.hop % layout.pipeline for message in sent} <= {rank}


def test_an_empty_table_has_no_messages():
    plan = Layout(2, 2, 4, 2).plan()
    for listed in (forward_sends, forward_receives, backward_sends, backward_receives):
        assert listed(plan, 1, ()) == []


def test_messages_read_in_their_direction():
    assert str(Message("forward", 2, 5)) == "forward hop 2-3 of micro-batch 5"
    assert str(Message("backward", 2, 5)) == "backward hop 3-2 of micro-batch 5"


@given(layouts())
def test_the_table_is_megatron_cores(layout):
    table = schedules.get_schedule_table(layout.microbatches, layout.virtual, layout.group)
    assert layout.table() == table


@settings(max_examples=100)
@given(layouts(4, 3, 12), st.booleans(), st.booleans())
def test_megatron_cores_schedules_do_what_the_posting_order_says(layout, overlap, forward_only):
    options = {"overlap": overlap, "forward_only": forward_only}
    for rank in range(layout.pipeline):
        assert replay(layout, rank, **options) == posting_order(layout, rank, **options)


# Each of them: groups of more micro-batches than stages, a last group that is smaller, and P = 2.
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "layout",
    [Layout(2, 2, 4, 2), Layout(2, 3, 7, 4), Layout(3, 2, 9, 5), Layout(4, 3, 8, 8)],
    ids=str,
)
def test_schedules_that_interleave(layout, overlap):
    ranks = range(layout.pipeline)
    run_to_the_end([replay(layout, rank, overlap=overlap, forward_only=False) for rank in ranks])


@pytest.mark.parametrize("layout", [Layout(2, 1, 1, 1), Layout(4, 1, 6, 4)], ids=str)
def test_the_schedule_without_interleaving(layout):
    ranks = range(layout.pipeline)
    run_to_the_end([replay(layout, rank, overlap=False, forward_only=False) for rank in ranks])


def test_a_step_that_leaves_a_message_out_is_refused():
    layout = Layout(2, 1, 2, 2)
    config = ModelParallelConfig(pipeline_dtype=torch.float32)
    communicator = Replay(config, layout.plan(), 0, early_relay=True)
    communicator.begin_step(layout.table(), forward_only=False)
    with pytest.raises(RuntimeError, match="before its forward send of forward hop 0-1"):
        communicator.end_step()


def test_a_schedule_that_asks_for_more_is_refused():
    layout = Layout(2, 1, 2, 2)
    config = ModelParallelConfig(pipeline_dtype=torch.float32)
    communicator = Replay(config, layout.plan(), 0, early_relay=True)
    communicator.begin_step(layout.table(), forward_only=True)
    with pytest.raises(RuntimeError, match="backward receive that the plan does not have"):
        communicator.recv_backward([1, 1, 1], is_last_stage=False)
