import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.depth_attention.state import DepthState

# Whole numbers: sums are exact in any order.
values = st.lists(st.integers(-1000, 1000), min_size=1, max_size=24)


def walk(embedding, outputs, block_size, *, cumulative):
    """The states before the first and after every sublayer."""
    state = DepthState((torch.tensor([float(embedding)]),), None)
    states = [state]
    for sublayer, output in enumerate(outputs):
        ends = (sublayer + 1) % block_size == 0 or sublayer + 1 == len(outputs)
        state = state.add(torch.tensor([float(output)]), ends_block=ends, cumulative=cumulative)
        states.append(state)
    return states


def numbers(tensors):
    return [tensor.item() for tensor in tensors]


@given(st.integers(-1000, 1000), values, st.integers(1, 25))
def test_delta_summaries_are_the_sums_of_their_own_blocks(embedding, outputs, block_size):
    for done, state in enumerate(walk(embedding, outputs, block_size, cumulative=False)):
        blocks = [outputs[i : min(i + block_size, done)] for i in range(0, done, block_size)]
        assert numbers(state.readable()) == [embedding, *map(sum, blocks)]


@given(st.integers(-1000, 1000), values, st.integers(1, 25))
def test_cumulative_sources_are_the_running_sum_of_delta_sources(embedding, outputs, block_size):
    delta = walk(embedding, outputs, block_size, cumulative=False)
    cumulative = walk(embedding, outputs, block_size, cumulative=True)
    for of_block, running in zip(delta, cumulative, strict=True):
        sums = torch.stack(of_block.readable()).cumsum(0)
        assert numbers(running.readable()) == numbers(sums)


@given(values, st.integers(1, 25), st.booleans())
def test_a_partial_sum_exists_only_inside_a_block(outputs, block_size, cumulative):
    for done, state in enumerate(walk(0, outputs, block_size, cumulative=cumulative)):
        inside = done % block_size != 0 and done < len(outputs)
        assert (state.partial is not None) == inside
        assert len(state.sources) == 1 + (-(-done // block_size) - inside)


@given(st.integers(-1000, 1000), values)
def test_the_baseline_is_one_running_sum(embedding, outputs):
    state = DepthState((), torch.tensor([float(embedding)]))
    for output in outputs:
        state = state.add(torch.tensor([float(output)]), ends_block=False)
    assert numbers(state.readable()) == [embedding + sum(outputs)]
    assert state.sources == ()


@pytest.mark.parametrize("cumulative", [True, False])
def test_adding_changes_no_tensor_that_exists(cumulative):
    before = DepthState((torch.ones(2),), torch.ones(2))
    after = before.add(torch.ones(2), ends_block=True, cumulative=cumulative)
    assert numbers(before.readable()[0]) == numbers(before.readable()[1]) == [1, 1]
    assert after.sources[0] is before.sources[0]
    assert numbers(after.sources[1]) == [2, 2]
    assert after.partial is None


def test_states_stay_of_their_type():
    state = DepthState((torch.ones(1),), None).add(torch.ones(1), ends_block=False)
    assert type(state) is DepthState
