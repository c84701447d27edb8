"""Megatron-Core's schedules over our chunk edges, rank by rank, without torch.distributed.

What a schedule asks for does not depend on what it receives, so each rank runs alone: a diary
stands in the place of the wire and hands out, for every message, what the plan says it holds. An
entry is the vector (source + 1, micro-batch); a gradient is the sum of (1, micro-batch) over the
chunks that read the source. So an entry, a cached read or a gradient of a wrong chunk, micro-batch
or source shows where it is read.
"""

from types import SimpleNamespace
from unittest.mock import patch

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron_attnres.model.megatron_config import megatron_config
from megatron_attnres.parallel.cpu import redirect_cuda_calls
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.pipeline.boundary import ChunkBoundary, packed_sources
from megatron_attnres.pipeline.cache import BlockCache
from megatron_attnres.pipeline.chunk import PipelineChunk
from megatron_attnres.pipeline.communicator import AttnResP2PCommunicator
from megatron_attnres.pipeline.messages import Message
from megatron_attnres.pipeline.relay import RelayExchange
from megatron_attnres.pipeline.transfer import Transfer
from megatron_attnres.pipeline.waiting import WaitClock
from megatron_attnres.pipeline.wire import Traffic
from tests.layouts import small_model
from tests.pipeline.orders import Event


class Group:
    """What the schedules ask of a process group."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


class DiaryWire:
    """In the place of ``Wire``: notes what is posted, and gives what the plan says would come."""

    def __init__(self, plan, early_relay):
        self._plan, self._early_relay = plan, early_relay
        self.diary = []

    def receive(self, message, kind, entries):
        self._note("post", kind, message)
        tensor = self.content(message, kind)
        assert len(tensor) == entries
        request = SimpleNamespace(wait=lambda: self._note("wait", kind, message))
        return Transfer(
            message,
            kind,
            0,
            tensor,
            lambda: request,
            sending=False,
            waits=WaitClock(torch.device("cpu")),
        )

    def send(self, message, kind, tensor, entries):
        self._note("send", kind, message)
        assert len(tensor) == entries
        assert torch.equal(tensor.detach(), self.content(message, kind)), f"not {message}, {kind}"

    def complete_sends(self):
        pass

    def take_traffic(self):
        return Traffic()

    def content(self, message, kind):
        """What a message holds: entries in the order of the plan, [entries, 1, 1, 2]."""
        hop = self._plan.hops[message.hop]
        partial = False
        sources = hop.relayed
        if kind == "critical":
            sources, partial = packed_sources(hop, self._early_relay), hop.partial
        if message.direction == "forward":
            rows = [entry_of(source, message.microbatch) for source in sources]
            rows += [partial_sum_of(hop.index, message.microbatch)] * partial
        else:
            readers = [readers_over(self._plan, hop.index, source) for source in sources]
            rows = [gradient_of(count, message.microbatch) for count in readers + [1] * partial]
        return torch.stack(rows)

    def _note(self, *event):
        self.diary.append(Event(*event))


def entry_of(source, microbatch):
    return torch.tensor([[[source + 1.0, microbatch]]])


def partial_sum_of(hop, microbatch):
    return torch.tensor([[[-1.0 - hop, microbatch]]])


def gradient_of(readers, microbatch):
    return torch.tensor([[[float(readers), float(readers * microbatch)]]])


def readers_over(plan, hop, source):
    """How many chunks read a source, or hand it on, because it crossed a hop."""
    receiver = plan.chunks[hop + 1]
    count = 1
    if plan.policy == "cached":
        count += len(plan.chunks[receiver.index + plan.pipeline_size :: plan.pipeline_size])
    if receiver.index < len(plan.hops) and source in plan.hops[receiver.index].sources:
        count += readers_over(plan, receiver.index, source)
    return count


class Reading(torch.autograd.Function):
    """A chunk's computation: hands its sources on, adds those it produces, reads all it gets."""

    @staticmethod
    def forward(ctx, model, microbatch, _, *entered):
        ctx.model, ctx.microbatch, ctx.entered = model, microbatch, len(entered)
        return tuple(tensor.clone() for tensor in entered) + model.made(microbatch)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, torch.zeros(1), *ctx.model.gradients(ctx.microbatch, gradients)


class Reader(nn.Module):
    """Stands for a model's chunk; its k-th call is for micro-batch k."""

    def __init__(self, plan, chunk, wire):
        super().__init__()
        self.plan, self.chunk, self.wire, self.calls = plan, chunk, wire, 0
        self.weight = nn.Parameter(torch.zeros(1))

    @property
    def hop_out(self):
        return self.plan.hops[self.chunk.index] if self.chunk.index < len(self.plan.hops) else None

    def forward(self, tokens, state, labels, samples):
        microbatch, self.calls = self.calls, self.calls + 1
        self._note("forward", microbatch)
        chunk = self.chunk
        entered = ()
        if state is not None:
            sources, partial_sum, _ = state
            assert len(sources) == len(chunk.available)
            for source, tensor in zip(chunk.available, sources, strict=True):
                assert torch.equal(tensor, entry_of(source, microbatch))
            entered = sources
            if partial_sum is not None:
                assert torch.equal(partial_sum, partial_sum_of(chunk.index - 1, microbatch))
                entered = (*sources, partial_sum)
        outputs = Reading.apply(self, microbatch, self.weight, *entered)
        if self.hop_out is None:
            return sum(output.sum() for output in outputs)
        available = len(chunk.available)
        made = outputs[len(entered) :]
        sources = (*outputs[:available], *made[: len(chunk.produced)])
        return sources, made[-1] if self.hop_out.partial else None

    def made(self, microbatch):
        """Produced sources and the partial sum at the end; a loss where there is none of them."""
        made = tuple(entry_of(source, microbatch) for source in self.chunk.produced)
        if self.hop_out is not None and self.hop_out.partial:
            made += (partial_sum_of(self.hop_out.index, microbatch),)
        return made or (torch.zeros(1),)

    def gradients(self, microbatch, from_outputs):
        """Of what entered: what came for the same source from downstream and 1 for reading it."""
        self._note("backward", microbatch)
        chunk, hop = self.chunk, self.hop_out
        available = len(chunk.available)
        entered = available + chunk.starts_with_partial
        one = gradient_of(1, microbatch)
        if hop is None:
            return [one] * entered
        for source, gradient in zip(chunk.produced, from_outputs[entered:], strict=False):
            readers = len(self.plan.chunks) - 1 - chunk.index
            assert torch.equal(gradient, gradient_of(readers, microbatch)), source
        if hop.partial:
            assert torch.equal(from_outputs[-1], one)
        return [gradient + one for gradient in from_outputs[:available]] + [one] * (
            chunk.starts_with_partial
        )

    def _note(self, direction, microbatch):
        self.wire.diary.append(
            Event("compute", None, Message(direction, self.chunk.index, microbatch))
        )


class Replay(AttnResP2PCommunicator):
    """The communicator over a diary."""

    def __init__(self, config, plan, rank, early_relay):
        # Not the base class's, which asks torch.distributed for its peers.
        self.config, self.plan, self.pp_group = config, plan, Group(rank, plan.pipeline_size)
        self.next_rank = self.prev_rank = None
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        self._wire = self.wire = DiaryWire(plan, early_relay)
        self._relay = self.relay = RelayExchange(plan, self.wire) if early_relay else None
        self._expected = {}


def step_of(_, chunk):
    return chunk(None, None), lambda output: (output.sum(), {"lm_loss": output.detach()})


def replay(layout, rank, *, overlap, forward_only):
    """Run the schedule on one rank; returns what was posted, waited for and sent, in order."""
    redirect_cuda_calls()
    plan, table = layout.plan(), layout.table()
    config = megatron_config(
        small_model(num_layers=sum(plan.layers_per_chunk)),
        ParallelLayout(pipeline=layout.pipeline, virtual_pipeline=layout.virtual),
        torch.float32,
        layout.group,
        overlap,
    )
    communicator = Replay(config, plan, rank, layout.early_relay)
    cache = BlockCache()
    chunks = [
        PipelineChunk(
            Reader(plan, chunk, communicator.wire),
            lambda *state: state,
            config,
            ChunkBoundary(plan, chunk, cache, communicator.relay),
            chunk.virtual_stage if plan.virtual_size > 1 else None,
        )
        for chunk in plan.chunks_of_rank(rank)
    ]
    communicator.begin_step(table, forward_only)
    one = Group(0, 1)
    groups = ProcessGroupCollection(
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
    cache.check_empty()
    assert [chunk.module.calls for chunk in chunks] == [layout.microbatches] * layout.virtual
    return communicator.wire.diary
