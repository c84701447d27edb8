import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.pipeline.payload import pack, unpack
from megatron_attnres.pipeline.plan import HopPlan

SHAPE = (3, 2, 4)

hops = (
    st.tuples(st.integers(0, 6), st.booleans())
    .filter(any)
    .map(lambda sizes: HopPlan(1, tuple(range(sizes[0])), sizes[1]))
)


def state_of(hop):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(SHAPE, generator=generator) for _ in range(hop.entries)]
    return (tensors[:-1], tensors[-1]) if hop.partial else (tensors, None)


@given(hops)
def test_a_state_comes_back_from_its_packing(hop):
    sources, partial = state_of(hop)
    packed = pack(sources, partial, hop)
    assert packed.shape == (hop.entries, *SHAPE)
    back, partial_back = unpack(packed, hop)
    assert len(back) == len(sources)
    assert all(map(torch.equal, back, sources))
    assert (partial_back is None) == (partial is None)
    assert partial is None or torch.equal(partial_back, partial)


def test_unpacking_copies_nothing():
    hop = HopPlan(0, (0, 1), True)
    packed = pack(*state_of(hop), hop)
    sources, partial = unpack(packed, hop)
    packed.zero_()
    assert not any(tensor.any() for tensor in (*sources, partial))


def test_gradients_return_to_their_entries():
    hop = HopPlan(0, (0, 1), True)
    sources, partial = state_of(hop)
    tensors = [tensor.requires_grad_() for tensor in (*sources, partial)]
    back, partial_back = unpack(pack(sources, partial, hop), hop)
    (back[0].sum() + 2 * back[1].sum() + 3 * partial_back.sum()).backward()
    for factor, tensor in enumerate(tensors, start=1):
        assert torch.equal(tensor.grad, torch.full(SHAPE, float(factor)))


@pytest.mark.parametrize(
    ("planned", "made", "message"),
    [
        (HopPlan(1, (0, 1), True), HopPlan(1, (0,), True), "hop 1-2 carries 2 .* made 1"),
        (HopPlan(1, (0,), True), HopPlan(1, (0, 1), True), "hop 1-2 carries 1 .* made 2"),
        (HopPlan(1, (0,), True), HopPlan(1, (0,), False), "a partial sum by the plan.* and none"),
        (HopPlan(1, (0,), False), HopPlan(1, (0,), True), "no partial sum by the plan.* and a$"),
    ],
)
def test_a_state_that_is_not_the_plans_is_refused(planned, made, message):
    with pytest.raises(RuntimeError, match=message):
        pack(*state_of(made), planned)
