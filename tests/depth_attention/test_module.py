import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_attnres.depth_attention import module
from megatron_attnres.depth_attention.module import DepthAttention, ResidualRead
from megatron_attnres.depth_attention.reference import depth_attention
from megatron_attnres.depth_attention.state import DepthState
from tests.depth_attention.memory import storage


def state_of(*numbers, partial=None, hidden=4):
    tensors = [torch.full((2, 1, hidden), float(number)) for number in numbers]
    return DepthState(tuple(tensors), partial)


@pytest.mark.parametrize("bias", [None, 0.0, -1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_start_values(bias, dtype):
    reader = DepthAttention(4, 1e-6, bias, dtype)
    expected = {"query": [0.0] * 4, "key_norm_weight": [1.0] * 4}
    if bias is not None:
        expected["recency_bias"] = [bias]
    parameters = dict(reader.named_parameters())
    assert {name: parameter.tolist() for name, parameter in parameters.items()} == expected
    assert {parameter.dtype for parameter in parameters.values()} == {dtype}


def test_no_parameter_takes_weight_decay():
    assert all(parameter.no_weight_decay for parameter in DepthAttention(4, 1e-6, 0.0).parameters())


def test_a_fresh_reader_takes_the_mean_of_sources_and_partial_sum():
    partial = torch.full((2, 1, 4), 6.0)
    torch.testing.assert_close(
        DepthAttention(4, 1e-6)(state_of(1, 2, partial=partial)), torch.full((2, 1, 4), 3.0)
    )
    torch.testing.assert_close(DepthAttention(4, 1e-6)(state_of(1, 2)), torch.full((2, 1, 4), 1.5))


def test_the_bias_goes_to_the_newest_source():
    reader = DepthAttention(4, 1e-6, recency_bias=50.0)
    partial = torch.full((2, 1, 4), 6.0)
    torch.testing.assert_close(reader(state_of(1, 2, partial=partial)), partial)
    torch.testing.assert_close(reader(state_of(1, 2)), torch.full((2, 1, 4), 2.0))


def test_a_reader_is_the_operator_with_its_parameters():
    torch.manual_seed(0)
    reader = DepthAttention(4, 0.5, recency_bias=0.3)
    torch.nn.init.normal_(reader.query)
    torch.nn.init.normal_(reader.key_norm_weight)
    sources = [torch.randn(2, 3, 4) for _ in range(3)]
    expected = depth_attention(
        sources, reader.query, reader.key_norm_weight, 0.5, reader.recency_bias
    )
    found = reader(DepthState(tuple(sources[:2]), sources[2]))
    torch.testing.assert_close(found, expected)


def test_every_parameter_gets_a_gradient():
    torch.manual_seed(0)
    reader = DepthAttention(4, 1e-6, recency_bias=0.0)
    torch.nn.init.normal_(reader.query)
    mixed = reader(DepthState((torch.randn(2, 1, 4), torch.randn(2, 1, 4)), None))
    (mixed * torch.randn(2, 1, 4)).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in reader.parameters())


def test_the_residual_stream_is_read_as_it_is():
    partial = torch.ones(2, 1, 4)
    assert ResidualRead()(DepthState((), partial)) is partial
    assert not list(ResidualRead().parameters())


def test_a_missing_residual_stream_is_a_fault_of_the_program():
    with pytest.raises(AssertionError, match="residual stream"):
        ResidualRead()(state_of(1))


def trained_readers(count, *, bias=None, operator="two-phase", hidden=4):
    """Readers in float64 as they are after some training."""
    readers = [DepthAttention(hidden, 1e-6, bias, torch.float64, operator) for _ in range(count)]
    for reader in readers:
        torch.nn.init.normal_(reader.query)
        torch.nn.init.normal_(reader.key_norm_weight)
    return readers


def source(hidden=4):
    return torch.randn(2, 3, hidden, dtype=torch.float64)


@settings(max_examples=40)
@given(
    st.integers(1, 9),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([None, 0.7]),
    st.integers(0, 999),
)
def test_looking_ahead_changes_nothing_that_a_reader_reads(count, readers, starts, bias, seed):
    torch.manual_seed(seed)
    readers = trained_readers(readers, bias=bias)
    sources = tuple(source() for _ in range(count))
    partials = [None if starts and index == 0 else source() for index in range(len(readers))]
    state = readers[0].look_ahead(DepthState(sources, partials[0]), (readers,))
    for reader, partial in zip(readers, partials, strict=True):
        alone = DepthState(sources, partial)
        expected = depth_attention(
            alone.readable(), reader.query, reader.key_norm_weight, 1e-6, reader.recency_bias
        )
        found = reader(state._replace(partial=partial))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(reader(alone), found, rtol=1e-12, atol=1e-12)
        state = state._replace(ahead=state.ahead[1:])
    assert state.ahead == ()


@pytest.mark.parametrize("bias", [None, 0.7])
@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize("block_size", [1, 2, 3, 7])
def test_a_state_carries_what_is_ahead_in_the_block_and_every_norm(block_size, cumulative, bias):
    torch.manual_seed(0)
    readers = trained_readers(7, bias=bias)
    state = DepthState((source(),), None)
    for sublayer, reader in enumerate(readers):
        end = min(sublayer - sublayer % block_size + block_size, len(readers))
        before = state
        state = reader.look_ahead(state, (readers[sublayer:end],))
        assert len(state.ahead) == end - sublayer
        assert len(state.inverse_rms) == len(state.sources)
        for norm, same in zip(state.inverse_rms, before.inverse_rms, strict=False):
            assert norm is same
        if sublayer % block_size:
            assert state is before
        output = reader(state)
        state = state.add(output, ends_block=sublayer + 1 == end, cumulative=cumulative)
        assert len(state.ahead) == end - sublayer - 1
    assert state.partial is None
    assert state.ahead == ()
    assert len(state.inverse_rms) == len(state.sources) - 1 == -(-len(readers) // block_size)


def test_the_norm_of_a_completed_summary_is_computed_once(monkeypatch):
    seen, original = [], module.inverse_rms
    monkeypatch.setattr(
        module, "inverse_rms", lambda source, eps: seen.append(source) or original(source, eps)
    )
    torch.manual_seed(0)
    readers = trained_readers(9)
    state = DepthState((source(),), None)
    for sublayer, reader in enumerate(readers[:-1]):
        block_end = sublayer - sublayer % 4 + 4
        state = reader.look_ahead(state, (readers[sublayer:block_end],))
        state = state.add(reader(state), ends_block=sublayer + 1 == block_end)
    # The output head reads on its own.
    readers[-1](state)
    assert len(seen) == len(state.sources) == 3
    assert [storage(one) for one in seen] == [storage(one) for one in state.sources]


def test_norms_carry_no_graph():
    torch.manual_seed(0)
    readers = trained_readers(2)
    state = DepthState((source().requires_grad_(),), None)
    state = readers[0].look_ahead(state, (readers,))
    assert not state.inverse_rms[0].requires_grad
    assert state.ahead[0].attended.mixed.requires_grad


@pytest.mark.parametrize("partial", [True, False])
def test_another_operator_looks_not_ahead_and_reads_the_same(partial):
    torch.manual_seed(0)
    readers = trained_readers(3, bias=0.7)
    state = DepthState((source(), source()), source() if partial else None)
    for reader in readers:
        in_two_phases = reader(state)
        reader.operator = "plain"
        assert reader.look_ahead(state, (readers,)) is state
        torch.testing.assert_close(reader(state), in_two_phases, rtol=1e-12, atol=1e-12)


def test_a_forced_operator_that_cannot_read_here_says_so():
    (reader,) = trained_readers(1, operator="fused")
    state = DepthState((source(),), None)
    for use in (reader, lambda state: reader.look_ahead(state, ((reader,),))):
        with pytest.raises(ValueError, match="needs CUDA"):
            use(state)


def test_the_residual_stream_has_nothing_ahead():
    state = DepthState((), torch.ones(2, 1, 4))
    reader = ResidualRead()
    assert reader.look_ahead(state, ((reader, ResidualRead()),)) is state
