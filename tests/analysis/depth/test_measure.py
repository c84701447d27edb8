"""Measured weights and magnitudes against a model recomputed by hand, layer by layer."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_attnres.analysis.depth.layout import layout_of
from megatron_attnres.analysis.depth.measure import measure, weights_of_tokens
from megatron_attnres.analysis.depth.records import partial_cells, table_of
from megatron_attnres.analysis.depth.windows import windows_of
from megatron_attnres.depth_attention.reference import depth_attention
from megatron_attnres.parallel.layout import ParallelLayout
from tests.distributed import run_ranks
from tests.layouts import Case, build, small_model

CONTEXT = 8
TOKENS = np.random.default_rng(0).integers(0, 64, 3 * CONTEXT + 5)
MODELS = {
    "block": small_model(num_layers=3, block_size=4),
    "odd": small_model(num_layers=3, block_size=3, recency_bias=0.5),
    "cumulative": small_model(num_layers=2, block_size=2, sources="cumulative"),
    "full": small_model(num_layers=3, mode="full"),
    "baseline": small_model(num_layers=3, mode="baseline"),
}


@dataclass
class ByHand:
    """One window: weights of every reader, states after every layer, losses of labelled tokens."""

    weights: list[Tensor]
    states: list[Tensor]
    loss: Tensor


def run_by_hand(model, module, window):
    """The model's own sublayers, with depth attention by its definition and sums of our own."""
    tokens = torch.from_numpy(window.tokens)[None]
    rotary = module.rotary_cosines, module.rotary_sines
    hidden = module.embedding(tokens).transpose(0, 1)
    baseline = model.attn_res.mode == "baseline"
    cumulative = model.attn_res.sources == "cumulative"
    complete, partial, in_block = [hidden], hidden if baseline else None, 0
    found = ByHand([], [], hidden.sum())

    def read(reader):
        if baseline:
            return partial
        sources = complete if in_block == 0 else [*complete, partial]
        bias = reader.recency_bias
        mixed, weights = depth_attention(
            sources, reader.query, reader.key_norm_weight, reader.eps, bias, return_weights=True
        )
        found.weights.append(weights.detach()[:, :, 0])
        return mixed

    for layer in module.layers.values():
        for reader in (layer.attention_reader, layer.mlp_reader):
            mixed = read(reader)
            if reader is layer.attention_reader:
                output = layer.attention(layer.attention_norm(mixed), rotary)
            else:
                output = layer.mlp(layer.mlp_norm(mixed))
            if not baseline and in_block == 0:
                partial = complete[-1] + output if cumulative else output
            else:
                partial = partial + output
            in_block += 1
            last = layer is list(module.layers.values())[-1] and reader is layer.mlp_reader
            if not baseline and (in_block == model.attn_res.block_size or last):
                complete, in_block = [*complete, partial], 0
        found.states.append(partial)
    logits = module.output(module.final_norm(read(module.head_reader)))[0][:, 0]
    labels = torch.from_numpy(window.labels)
    labelled = labels >= 0
    found.loss = torch.nn.functional.cross_entropy(
        logits[labelled], labels[labelled], reduction="sum"
    )
    return found


def compare_with_hand(name):
    """Largest differences of weights and magnitudes in float64, and what should be exact."""
    model = MODELS[name]
    _, step = build(Case(model, ParallelLayout()), torch.float64)
    module, layout = step.chunks[0].module.eval(), layout_of(model)
    windows = windows_of(TOKENS, CONTEXT)
    measured = measure(module, layout, windows, 2)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in module.modules())

    hand = [run_by_hand(model, module, window) for window in windows]
    predictions = len(TOKENS) - 1
    loss = sum(one.loss for one in hand) / predictions
    gradients = torch.autograd.grad(loss, [state for one in hand for state in one.states])
    states = [torch.cat(layer) for layer in zip(*(one.states for one in hand), strict=True)]
    layers = model.num_layers
    by_layer = [torch.cat(gradients[layer::layers]) for layer in range(layers)]

    def rms(tensors):
        return np.array([tensor.detach().square().mean().sqrt().item() for tensor in tensors])

    magnitudes = measured.magnitudes
    np.testing.assert_allclose(magnitudes.loss, loss.item(), rtol=1e-12)
    np.testing.assert_allclose(magnitudes.output, rms(states), rtol=1e-12)
    np.testing.assert_allclose(magnitudes.gradient, rms(by_layer), rtol=1e-9)
    assert (magnitudes.predictions, measured.tokens) == (predictions, len(TOKENS))
    if name == "baseline":
        assert measured.weights is None
        return
    wanted = [torch.cat(reader, 1) for reader in zip(*(one.weights for one in hand), strict=True)]
    for mean, one, reader in zip(measured.weights.mean, wanted, layout.readers, strict=True):
        assert mean.shape == (reader.sources,)
        np.testing.assert_allclose(mean, one.mean(dim=1).numpy(), rtol=1e-12)
        assert mean.sum() == pytest.approx(1, abs=1e-12)

    first = weights_of_tokens(module, layout, TOKENS[:CONTEXT])
    for one, by_hand in zip(first.weights, hand[0].weights, strict=True):
        np.testing.assert_allclose(one, by_hand.numpy(), atol=1e-7)
        np.testing.assert_allclose(one.sum(axis=0), 1, atol=1e-6)
    # What a token attends to does not depend on the tokens behind it.
    alone = weights_of_tokens(module, layout, TOKENS[:1])
    for one, longer in zip(alone.weights, first.weights, strict=True):
        np.testing.assert_allclose(one, longer[:, :1], atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_measurements_are_those_of_the_definition(name):
    run_ranks(compare_with_hand, 1, name)


def measure_in_pieces():
    model = MODELS["odd"]
    _, step = build(Case(model, ParallelLayout()), torch.float32)
    module, layout = step.chunks[0].module.eval(), layout_of(model)
    windows = windows_of(TOKENS, CONTEXT)
    whole = measure(module, layout, windows, 4)
    pieces = [measure(module, layout, part, 1) for part in (windows[:2], windows[2:])]
    for mean, *parts in zip(
        whole.weights.mean, *(piece.weights.mean for piece in pieces), strict=True
    ):
        shares = [piece.tokens / whole.tokens for piece in pieces]
        together = sum(share * part for share, part in zip(shares, parts, strict=True))
        np.testing.assert_allclose(mean, together, rtol=1e-5)
    without = measure(module, layout, windows, 3, with_weights=False)
    assert without.weights is None
    np.testing.assert_allclose(without.magnitudes.gradient, whole.magnitudes.gradient, rtol=1e-4)

    one = measure(module, layout, windows_of(TOKENS[:1], CONTEXT), 1).magnitudes
    assert (one.loss, one.gradient, one.predictions) == (None, None, 0)
    assert np.isfinite(one.output).all()


def test_a_text_in_pieces_and_a_text_of_one_token():
    run_ranks(measure_in_pieces, 1)


def measure_in_tiles(values_at_once):
    from megatron_attnres.analysis.depth import observers

    observers._VALUES_AT_ONCE = values_at_once
    model = MODELS["block"]
    _, step = build(Case(model, ParallelLayout()), torch.float32)
    module = step.chunks[0].module.eval()
    return measure(module, layout_of(model), windows_of(TOKENS, CONTEXT), 2).weights


def test_tiles_of_a_long_window_change_nothing():
    [whole], [tiled] = (run_ranks(measure_in_tiles, 1, values) for values in (1 << 25, 100))
    for one, other in zip(whole.mean, tiled.mean, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    table, partial = table_of(whole, "mlp"), partial_cells(whole.layout, "mlp")
    assert np.isnan(table).tolist() == [
        [False, False, True],
        [False, False, True],
        [False, False, False],
        [False, False, False],
    ]
    assert partial == [(0, 1), (1, 1), (2, 2)]
