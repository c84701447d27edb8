"""What the schedules' one tensor per hop holds, with and without a relay lane beside it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.pipeline.boundary import (
    ChunkBoundary,
    pack,
    packed_sources,
    unpack,
)
from megatron_attnres.pipeline.cache import BlockCache
from megatron_attnres.pipeline.messages import lane_entries
from megatron_attnres.pipeline.plan import HopPlan, PipelinePlan

SHAPE = (3, 2, 4)


def hop_of(held, relayed, critical, partial):
    """A hop to a rank that holds the oldest sources; the next are relayed, the newest critical."""
    sources = tuple(range(held, held + relayed + critical))
    return HopPlan(1, sources[:relayed], sources[relayed:], partial)


sizes = st.integers(0, 4)
hops = st.builds(hop_of, sizes, sizes, sizes, st.booleans())
# A chunk completes a source or ends inside a block: the schedules' tensor is never empty.
crossings = st.tuples(hops, st.booleans()).filter(
    lambda crossing: lane_entries(crossing[0], "critical", crossing[1])
)


def state_of(hop):
    """All sources complete at the hop, by index, and the partial sum."""
    generator = torch.Generator().manual_seed(0)
    complete = max(hop.sources, default=-1) + 1
    sources = [torch.randn(SHAPE, generator=generator) for _ in range(complete)]
    return sources, torch.randn(SHAPE, generator=generator) if hop.partial else None


@given(hops)
def test_early_relay_takes_the_relayed_sources_out_of_the_packing(hop):
    assert packed_sources(hop, early_relay=False) == hop.sources
    assert packed_sources(hop, early_relay=True) == hop.critical
    assert lane_entries(hop, "critical", early_relay=False) == hop.entries
    assert lane_entries(hop, "critical", early_relay=True) == hop.entries - len(hop.relayed)


@given(crossings)
def test_a_state_comes_back_from_its_packing(crossing):
    hop, early_relay = crossing
    sources, partial = state_of(hop)
    packed = pack(sources, partial, hop, early_relay)
    assert packed.shape == (lane_entries(hop, "critical", early_relay), *SHAPE)
    back, partial_back = unpack(packed, hop, early_relay)
    assert tuple(back) == packed_sources(hop, early_relay)
    assert all(torch.equal(tensor, sources[source]) for source, tensor in back.items())
    assert (partial_back is None) == (partial is None)
    assert partial is None or torch.equal(partial_back, partial)


def test_unpacking_copies_nothing():
    hop = HopPlan(0, (0,), (1,), True)
    packed = pack(*state_of(hop), hop, early_relay=False)
    sources, partial = unpack(packed, hop, early_relay=False)
    packed.zero_()
    assert not any(tensor.any() for tensor in (*sources.values(), partial))


def test_gradients_return_to_their_entries():
    hop = HopPlan(0, (0,), (1,), True)
    sources, partial = state_of(hop)
    tensors = [tensor.requires_grad_() for tensor in (*sources, partial)]
    back, partial_back = unpack(pack(sources, partial, hop, False), hop, False)
    (back[0].sum() + 2 * back[1].sum() + 3 * partial_back.sum()).backward()
    for factor, tensor in enumerate(tensors, start=1):
        assert torch.equal(tensor.grad, torch.full(SHAPE, float(factor)))


# The hop falls inside the second block, or on its end.
@pytest.mark.parametrize(
    ("block_size", "sources", "partial", "message"),
    [
        (3, 1, True, "chunk 0 ends with 1 sources and a partial sum; the plan says 2 and a"),
        (3, 3, True, "chunk 0 ends with 3 sources and a partial sum; the plan says 2 and a"),
        (3, 2, False, "chunk 0 ends with 2 sources and no partial sum; the plan says 2 and a"),
        (2, 3, True, "chunk 0 ends with 3 sources and a partial sum; the plan says 3 and none"),
    ],
)
def test_a_state_that_is_not_the_plans_is_refused(block_size, sources, partial, message):
    plan = PipelinePlan((2, 2), 2, block_size)
    boundary = ChunkBoundary(plan, plan.chunks[0], BlockCache(), None)
    made = [torch.zeros(SHAPE) for _ in range(sources)]
    with pytest.raises(RuntimeError, match=message):
        boundary.leave(made, torch.zeros(SHAPE) if partial else None)
