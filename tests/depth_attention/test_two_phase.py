"""Values and gradients of a block's reads, in both forms, against the exact ones in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_attnres.depth_attention import phase_one, tiles
from megatron_attnres.depth_attention.module import DepthAttention
from megatron_attnres.depth_attention.state import DepthState
from tests.depth_attention.accuracy import (
    LIMITS,
    TOKENS_PER_TILE,
    Block,
    by_reference,
    check,
    in_two_phases,
    one_by_one,
    results,
)

FORMS = [one_by_one, in_two_phases]
NARROW = [torch.float32, torch.bfloat16]
SCALES = [
    (1.0,),
    (1e-3,),
    (1e3,),
    (1e-3, 1e3),
    (1e-3, 1.0, 30.0, 1e3, 0.0),
    (1.0, 0.0),
    (0.0,),
]


def blocks(tokens, hidden, readers=4):
    return st.builds(
        Block,
        summaries=st.integers(1, 16),
        readers=st.integers(1, readers),
        starts=st.booleans(),
        tokens=tokens,
        hidden=hidden,
        biased=st.booleans(),
        scales=st.sampled_from(SCALES),
        seed=st.integers(0, 2**31),
    )


# Every shape is tried in float64. What a narrow type leaves of digits is a statement about tensors
# of some size: a gradient of a few numbers, each a difference of much larger ones by chance, has
# lost them in the reference as well.
SMALL = blocks(tokens=st.integers(1, 6), hidden=st.integers(2, 24))
OF_SOME_SIZE = blocks(tokens=st.integers(32, 48), hidden=st.integers(48, 96))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=250)
@given(block=SMALL)
def test_float64_is_exact_for_any_shape_number_and_scale_of_sources(form, block):
    check(form, block, torch.float64)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=120)
@given(block=OF_SOME_SIZE)
def test_narrow_types_keep_their_digits_for_any_number_and_scale_of_sources(form, dtype, block):
    check(form, block, dtype)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", [torch.float64, *NARROW])
@pytest.mark.parametrize("form", FORMS)
def test_a_deep_block_of_a_wider_model(form, dtype, scales):
    check(form, Block(16, 2, False, 150, 256, True, scales, seed=3), dtype, tile_bytes=1 << 20)


@pytest.mark.parametrize("dtype", [torch.float64, *NARROW])
@pytest.mark.parametrize("tile_bytes", [1, 1 << 30])
@pytest.mark.parametrize("form", FORMS)
def test_tiles_of_one_token_and_one_tile_of_all(form, tile_bytes, dtype):
    check(form, Block(3, 3, True, 40, 64, True, (1e-3, 1.0, 1e3)), dtype, tile_bytes)


@pytest.mark.parametrize("dtype", [torch.float64, *NARROW])
@pytest.mark.parametrize("summaries", [1, 5])
def test_a_bias_of_a_block_s_first_reader_is_the_newest_summary_s(summaries, dtype):
    check(in_two_phases, Block(summaries, 4, True, 40, 64, True), dtype)


# Phase 1's result is rounded to bfloat16: phase 2 cannot tell much finer differences from it.
@pytest.mark.parametrize(
    ("form", "apart"), [*((one_by_one, apart) for apart in (0.3, 0.1, 0.03)), (in_two_phases, 0.3)]
)
def test_in_bfloat16_what_sources_have_in_common_does_not_drown_what_tells_them_apart(form, apart):
    block = Block(6, 3, False, 100, 64, False, seed=5, apart=apart)
    check(form, block, torch.bfloat16)


def test_what_was_read_ahead_is_merged_once():
    """A second time autograd would add up the factors of two gradients, each on its own."""
    reader = DepthAttention(4, 1e-6, operator="two-phase")
    source, partial = torch.randn(2, 1, 4, requires_grad=True), torch.randn(2, 1, 4)
    state = reader.look_ahead(DepthState((source,), partial), ((reader,),))
    reader(state)
    with pytest.raises(RuntimeError, match="merged before; read ahead again"):
        reader(state)
    with torch.no_grad():
        state = reader.look_ahead(DepthState((source,), partial), ((reader,),))
        assert torch.equal(reader(state), reader(state))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("form", FORMS)
def test_a_bias_s_gradient_adds_up_over_any_number_of_tiles(form, dtype, monkeypatch):
    """Of one sign for every token: a sum in the narrow type would stand still before long."""
    block = Block(2, starts=True, tokens=200, hidden=64, biased=True)
    leaves = block.leaves(dtype)
    gradient = leaves["summary 1"]
    wide = {name: leaf.double() for name, leaf in leaves.items()}
    wanted = results(by_reference, block, wide, [gradient.double()])["bias 0"]
    monkeypatch.setitem(tiles._BYTES, "cpu", 1)
    found = results(form, block, leaves, [gradient])["bias 0"]
    assert (found.double() - wanted).abs() <= LIMITS[dtype] * wanted.abs()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e-6, 1e6, 1e15])
def test_finite_operands_give_finite_results_far_outside_the_usual_scales(form, scale, dtype):
    block = Block(3, 3, True, biased=True, scales=(scale, 1.0))
    gradients = block.gradients(dtype)
    for name, tensor in results(form, block, block.leaves(dtype), gradients).items():
        assert tensor.isfinite().all(), name


@pytest.mark.parametrize("form", FORMS)
def test_a_large_query_picks_one_source_without_overflow(form):
    block = Block(3, 2)
    leaves = block.leaves(torch.float32)
    leaves |= {name: 1e4 * leaf for name, leaf in leaves.items() if name.startswith("query")}
    found = results(form, block, leaves, block.gradients(torch.float32))
    assert all(tensor.isfinite().all() for tensor in found.values())
    for reader in range(block.readers):
        sources = [leaves[f"summary {index}"] for index in range(3)]
        sources.append(leaves[block.partial(reader)])
        differences = torch.stack(sources) - found[f"output {reader}"]
        assert differences.abs().amax(-1).amin(0).max() < 1e-4


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_gradients_of_the_phases_together(starts, biased):
    block = Block(3, 3, starts, tokens=1, hidden=3, biased=biased, seed=4)
    leaves = {name: torch.nn.Parameter(leaf) for name, leaf in block.leaves(torch.float64).items()}

    def read(*tensors):
        return tuple(in_two_phases(block, dict(zip(leaves, tensors, strict=True))))

    assert torch.autograd.gradcheck(read, tuple(leaves.values()))


@pytest.mark.parametrize("used", [[0], [2], [0, 2], [1]])
@pytest.mark.parametrize("starts", [True, False])
def test_readers_whose_results_nobody_uses_change_no_gradient(starts, used):
    """Phase 1 has served all of them and gets gradients back for some."""
    block = Block(4, 3, starts, biased=True)
    leaves = block.leaves(torch.float64)
    gradients = block.gradients(torch.float64)

    def gradients_of_some(form):
        parameters = {name: torch.nn.Parameter(leaf) for name, leaf in leaves.items()}
        outputs = form(block, parameters)
        torch.autograd.backward([outputs[i] for i in used], [gradients[i] for i in used])
        return {name: parameter.grad for name, parameter in parameters.items()}

    found, wanted = gradients_of_some(in_two_phases), gradients_of_some(by_reference)
    for name, exact in wanted.items():
        if exact is None:
            # Phase 1 cannot tell the unused queries from the others: theirs are zeros.
            assert found[name] is None or not found[name].any(), name
        else:
            torch.testing.assert_close(found[name], exact, rtol=1e-12, atol=1e-12)


def test_operands_without_gradients_get_none():
    block = Block(3, 2, starts=True)
    leaves = {name: torch.nn.Parameter(leaf) for name, leaf in block.leaves(torch.float64).items()}
    for name in ("summary 0", "query 1", "partial sum 1"):
        leaves[name].requires_grad_(False)
    outputs = in_two_phases(block, leaves)
    torch.autograd.backward(outputs, block.gradients(torch.float64))
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == leaf.requires_grad, name


def test_no_operand_is_changed():
    block = Block(3, 3, biased=True)
    leaves, gradients = block.leaves(torch.float32), block.gradients(torch.float32)
    copies = [tensor.clone() for tensor in (*leaves.values(), *gradients)]
    for form in FORMS:
        parameters = {name: torch.nn.Parameter(leaf) for name, leaf in leaves.items()}
        torch.autograd.backward(form(block, parameters), gradients)
    for tensor, copy in zip((*leaves.values(), *gradients), copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("form", FORMS)
def test_sources_may_be_strided_and_gradients_expanded(form):
    """An embedding's output is a transposed [b, s, h]; a sum's gradient is one number."""
    block = Block(3, 2, tokens=5)
    leaves = block.leaves(torch.float64)
    strided = {
        name: leaf.transpose(0, 1).contiguous().transpose(0, 1) if leaf.ndim == 3 else leaf
        for name, leaf in leaves.items()
    }
    assert not strided["summary 0"].is_contiguous()
    gradient = [torch.ones((), dtype=torch.float64).expand(5, 2, block.hidden)] * block.readers
    found = results(form, block, strided, gradient)
    for name, exact in results(by_reference, block, leaves, gradient).items():
        torch.testing.assert_close(found[name], exact, rtol=1e-12, atol=1e-12)


def test_tests_of_values_see_several_tiles_and_a_ragged_one(monkeypatch):
    """What the tests above rely on."""
    seen, original = [], phase_one.token_tiles
    monkeypatch.setattr(
        phase_one, "token_tiles", lambda *sizes: seen.append(original(*sizes)) or seen[-1]
    )
    check(in_two_phases, Block(3, 2, tokens=16), torch.float64)
    assert len(seen) == 2
    for stretches in seen:
        lengths = [stretch.stop - stretch.start for stretch in stretches]
        assert lengths == [TOKENS_PER_TILE] * 4 + [4]
