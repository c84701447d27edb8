"""The messages that a rank expects are those that its neighbour and Megatron-Core's schedule have.

The replay runs Megatron-Core's schedules rank by rank, without torch.distributed: what a schedule
asks for does not depend on what it receives. Every received tensor carries the message that the
plan takes it for, and the chunk that reads it compares.
"""

from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules
from torch import nn

from megatron_attnres.model.megatron_config import megatron_config
from megatron_attnres.parallel.cpu import redirect_cuda_calls
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.pipeline.communicator import AttnResP2PCommunicator, Traffic
from megatron_attnres.pipeline.messages import (
    Message,
    backward_receives,
    backward_sends,
    forward_receives,
    forward_sends,
)
from megatron_attnres.pipeline.plan import even_plan
from tests.layouts import small_model


class Layout(NamedTuple):
    """Sizes that decide on the order of messages."""

    pipeline: int
    virtual: int
    microbatches: int
    group: int

    @property
    def chunks(self):
        return self.pipeline * self.virtual

    def plan(self):
        return even_plan(self.chunks, self.pipeline, self.virtual, 3)

    def table(self):
        return schedules.get_schedule_table(self.microbatches, self.virtual, self.group)


@st.composite
def layouts(draw, largest_pipeline=6, largest_virtual=4, most_microbatches=20):
    pipeline = draw(st.integers(2, largest_pipeline))
    virtual = draw(st.integers(1, largest_virtual))
    microbatches = draw(st.integers(pipeline if virtual > 1 else 1, most_microbatches))
    group = draw(st.integers(min(pipeline, microbatches), microbatches))
    rest = microbatches % group
    assume(virtual == 1 or rest == 0 or rest >= pipeline)
    return Layout(pipeline, virtual, microbatches, group)


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


class Group:
    """What the schedules ask of a process group."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def label(direction, hop, microbatch):
    """A tensor that tells which message it is."""
    return torch.tensor([1.0 if direction == "forward" else 2.0, hop, microbatch])


class Replay(AttnResP2PCommunicator):
    """The communicator with a diary in the place of torch.distributed."""

    def __init__(self, config, plan, rank):
        # Not the base class's, which asks torch.distributed for its peers.
        self.config, self.plan, self.pp_group = config, plan, Group(rank, plan.pipeline_size)
        self.next_rank = self.prev_rank = None
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        self._expected, self._outbox, self._traffic = {}, [], Traffic()
        self.diary = []

    def _receive(self, direction, peer):
        message = self._next(f"{direction} receive")
        self.diary.append(("post", message))
        wait = SimpleNamespace(wait=lambda: self.diary.append(("wait", message)))
        return label(*message).requires_grad_(), wait

    def _send(self, direction, tensor, peer):
        message = self._next(f"{direction} send")
        assert torch.equal(tensor.detach(), label(*message)), f"no {message} here"
        self.diary.append(("send", message))


class Labelled(torch.autograd.Function):
    """Turns the label of the hop before a chunk into that of the hop after it, and back."""

    @staticmethod
    def forward(ctx, received, chunk, microbatch):
        ctx.chunk, ctx.microbatch = chunk, microbatch
        if not chunk.is_first:
            assert torch.equal(received, label("forward", chunk.index - 1, microbatch))
        return label("forward", chunk.index, microbatch)

    @staticmethod
    def backward(ctx, gradient):
        if not ctx.chunk.is_last:
            assert torch.equal(gradient, label("backward", ctx.chunk.index, ctx.microbatch))
        return label("backward", ctx.chunk.index - 1, ctx.microbatch), None, None


class Chunk(nn.Module):
    """Checks and passes on labels; its k-th call is for micro-batch k."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config, chunk, plan):
        super().__init__()
        self.config, self.index = config, chunk.index
        self.is_first = chunk.index == 0
        self.is_last = chunk.index == len(plan.hops)
        self.vp_stage = chunk.virtual_stage if plan.virtual_size > 1 else None
        self.nothing_received = nn.Parameter(torch.zeros(3))
        self.calls = 0

    def set_input_tensor(self, tensors):
        (self.received,) = tensors
        assert (self.received is None) == self.is_first

    def forward(self):
        microbatch, self.calls = self.calls, self.calls + 1
        received = self.nothing_received if self.is_first else self.received
        return Labelled.apply(received, self, microbatch)


def step_of(_, chunk):
    return chunk(), lambda output: (output.sum(), {"lm_loss": output.detach()})


def replay(layout, rank, *, overlap, forward_only):
    """Run the schedule on one rank; returns what was posted, waited for and sent, in order."""
    redirect_cuda_calls()
    plan, table = layout.plan(), layout.table()
    config = megatron_config(
        small_model(num_layers=layout.chunks),
        ParallelLayout(pipeline=layout.pipeline, virtual_pipeline=layout.virtual),
        torch.float32,
        layout.group,
        overlap,
    )
    chunks = [Chunk(config, chunk, plan) for chunk in plan.chunks_of_rank(rank)]
    communicator = Replay(config, plan, rank)
    communicator.begin_step(table, forward_only)
    one = Group(0, 1)
    groups = SimpleNamespace(
        tp=one, cp=one, embd=None, pos_embd=None, pp=communicator.pp_group, dp_cp=one
    )
    virtual = layout.virtual if layout.virtual > 1 else None
    schedule = schedules.get_forward_backward_func(layout.pipeline, virtual)
    # Megatron-Core takes every group for one rank where torch.distributed is not running.
    with patch.object(torch.distributed, "is_initialized", return_value=True):
        schedule(
            forward_step_func=step_of,
            data_iterator=[None] * layout.virtual,
            model=chunks,
            num_microbatches=layout.microbatches,
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
    communicator.end_step()
    assert [chunk.calls for chunk in chunks] == [layout.microbatches] * layout.virtual
    return communicator.diary


def run_to_the_end(diaries):
    """Let all ranks work off their diaries; a rank stops at a wait for what was not sent yet."""
    sent, positions = set(), [0] * len(diaries)
    moved = True
    while moved:
        moved = False
        for rank, diary in enumerate(diaries):
            while positions[rank] < len(diary):
                what, message = diary[positions[rank]]
                if what == "wait" and message not in sent:
                    break
                if what == "send":
                    sent.add(message)
                positions[rank] += 1
                moved = True
    stuck = [d[p] for d, p in zip(diaries, positions, strict=True) if p < len(d)]
    assert not stuck, f"ranks wait for ever: {stuck}"


@settings(max_examples=40)
@given(layouts(4, 3, 12), st.booleans(), st.booleans())
def test_megatron_cores_schedules_ask_in_the_order_of_the_plan(layout, overlap, forward_only):
    diaries = [
        replay(layout, rank, overlap=overlap, forward_only=forward_only)
        for rank in range(layout.pipeline)
    ]
    for diary in diaries:
        posted = [message for what, message in diary if what == "post"]
        waited = [message for what, message in diary if what == "wait"]
        assert sorted(waited) == sorted(posted)
    run_to_the_end(diaries)


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
    communicator = Replay(ModelParallelConfig(pipeline_dtype=torch.float32), layout.plan(), 0)
    communicator.begin_step(layout.table(), forward_only=False)
    with pytest.raises(RuntimeError, match="before its forward send of forward hop 0-1"):
        communicator.end_step()


def test_a_schedule_that_asks_for_more_is_refused():
    layout = Layout(2, 1, 2, 2)
    communicator = Replay(ModelParallelConfig(pipeline_dtype=torch.float32), layout.plan(), 0)
    communicator.begin_step(layout.table(), forward_only=True)
    with pytest.raises(RuntimeError, match="backward receive that the plan does not have"):
        communicator.recv_backward([1, 1, 1], is_last_stage=False)
