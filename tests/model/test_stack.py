"""A chunk's layers on one rank: two phases against the plain form, what runs, what is kept."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from unittest import mock

import pytest
import torch

from megatron_attnres.depth_attention import module
from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.model.megatron_config import megatron_config
from megatron_attnres.model.rotary import rotary_tables
from megatron_attnres.model.stack import LayerStack
from megatron_attnres.parallel.groups import initialize_groups
from megatron_attnres.parallel.layout import ParallelLayout
from tests.depth_attention.memory import apart_from, kept_for_backward, storage
from tests.distributed import GROUP_TIMEOUT, run_ranks
from tests.layouts import Case, build, microbatches, relative_error, small_model

NUM_LAYERS = 4
SUBLAYERS = 2 * NUM_LAYERS
BATCH = 2
# Blocks of one sublayer (full mode), of odd length (they end inside a layer) and of all sublayers.
BLOCK_SIZES = [1, 2, 3, 4, 5, 7, 8]
# The whole model, and chunks that start inside most of these blocks.
CHUNKS = [range(NUM_LAYERS), range(1, 3), range(2, 4)]
RECOMPUTE = ["none", "selective", "full"]


def one_rank():
    return initialize_groups(ParallelLayout(), GROUP_TIMEOUT).collection


def ends_block(sublayer, block_size):
    return (sublayer + 1) % block_size == 0 or sublayer + 1 == SUBLAYERS


def stack_of(groups, model, operator="auto", layers=CHUNKS[0], recompute="none"):
    """Layers with parameters off their start values, the same for every operator."""
    config = megatron_config(model, ParallelLayout(), torch.float64, 1, overlap_p2p=False)
    attn_res = replace(model.attn_res, operator=operator)

    def ends(sublayer):
        return attn_res.mode != "baseline" and ends_block(sublayer, attn_res.block_size)

    stack = LayerStack(config, attn_res, groups, layers, ends, recompute)
    torch.manual_seed(0)
    for parameter in stack.parameters():
        start = 0.3 * torch.randn_like(parameter)
        parameter.data = start + parameter.data if parameter.ndim == 1 else start
    return stack


def entering(model, layers):
    """What reaches a chunk: random sources and, inside a block, a partial sum."""
    done, size = 2 * layers.start, model.attn_res.block_size
    torch.manual_seed(1)

    def tensor():
        shape = (model.seq_length, BATCH, model.hidden_size)
        return torch.randn(shape, dtype=torch.float64).requires_grad_()

    if model.attn_res.mode == "baseline":
        return DepthState((), tensor())
    sources = tuple(tensor() for _ in range(1 + done // size))
    return DepthState(sources, tensor() if done % size else None)


def rotary_of(model):
    return rotary_tables(
        model.seq_length, model.kv_channels, 10_000.0, torch.float64, torch.device("cpu")
    )


def values_and_gradients(stack, model, layers):
    """Outputs, and gradients of everything that enters and of every parameter, by name."""
    state = entering(model, layers)
    after = stack(state, rotary_of(model))
    assert after.ahead == ()
    outputs = after.readable()
    torch.manual_seed(2)
    torch.autograd.backward(outputs, [torch.randn_like(output) for output in outputs])
    found = {f"output {index}": output.detach() for index, output in enumerate(outputs)}
    found |= {f"input {index}": tensor.grad for index, tensor in enumerate(state.readable())}
    return found | {name: parameter.grad for name, parameter in stack.named_parameters()}


@contextmanager
def phase_one_calls():
    """Every call of phase 1: the queries that it has room for, and its own of each layer."""
    served, original = [], module.attend_to_summaries

    def noting(summaries, inverse_rms, directions, newest_bias, layers):
        served.append((len(directions), [layer.stop - layer.start for layer in layers]))
        return original(summaries, inverse_rms, directions, newest_bias, layers)

    with mock.patch.object(module, "attend_to_summaries", noting):
        yield served


@contextmanager
def normed_sources():
    """Every source whose inverse RMS is computed as a completed summary's."""
    normed, original = [], module.inverse_rms

    def counting(source, eps):
        normed.append(source)
        return original(source, eps)

    with mock.patch.object(module, "inverse_rms", counting):
        yield normed


def expected_calls(layers, block_size):
    """Phase 1 runs once for every block that a chunk has a part in, in the shape of all of it."""
    own = range(2 * layers.start, 2 * layers.stop)
    blocks = groupby(own, lambda sublayer: sublayer // block_size)
    return [
        (
            min(block_size, SUBLAYERS - block * block_size),
            [len(list(part)) for _, part in groupby(sublayers, lambda sublayer: sublayer // 2)],
        )
        for block, sublayers in blocks
    ]


def expected_recomputed_calls(layer, block_size):
    """A recomputed layer keeps to itself."""
    parts = groupby((2 * layer, 2 * layer + 1), lambda sublayer: sublayer // block_size)
    sizes = [len(list(part)) for _, part in parts]
    return [(size, [size]) for size in sizes]


def _errors_job(recompute, sources, recency_bias):
    """The largest error of anything, by block size and chunk."""
    groups, worst = one_rank(), {}
    for block_size in BLOCK_SIZES:
        mode = "full" if block_size == 1 else "block"
        model = small_model(NUM_LAYERS, mode, block_size, sources, recency_bias)
        for layers in CHUNKS:
            plain = stack_of(groups, model, "plain", layers)
            ours = stack_of(groups, model, "two-phase", layers, recompute)
            wanted = values_and_gradients(plain, model, layers)
            found = values_and_gradients(ours, model, layers)
            assert found.keys() == wanted.keys()
            worst[block_size, layers] = max(
                (relative_error(found[name], wanted[name]), name) for name in wanted
            )
    return worst


@pytest.mark.parametrize("recency_bias", [None, 0.7])
@pytest.mark.parametrize("sources", ["delta", "cumulative"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_two_phases_give_the_plain_form_s_values_and_gradients(recompute, sources, recency_bias):
    (worst,) = run_ranks(_errors_job, 1, recompute, sources, recency_bias)
    assert len(worst) == len(BLOCK_SIZES) * len(CHUNKS)
    wrong = {case: error for case, error in worst.items() if error[0] > 1e-12}
    assert not wrong


def _served_job(recompute):
    groups, served = one_rank(), {}
    for block_size in BLOCK_SIZES:
        model = small_model(NUM_LAYERS, "block", block_size)
        for layers in CHUNKS:
            stack = stack_of(groups, model, "two-phase", layers, recompute)
            with phase_one_calls() as forward:
                after = stack(entering(model, layers), rotary_of(model))
            with phase_one_calls() as backward:
                sum(output.sum() for output in after.readable()).backward()
            served[block_size, layers] = forward, backward
    return served


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_phase_one_runs_once_for_what_a_chunk_has_of_a_block(recompute):
    (served,) = run_ranks(_served_job, 1, recompute)
    for (block_size, layers), (forward, backward) in served.items():
        if recompute != "full":
            assert forward == expected_calls(layers, block_size), (block_size, layers)
            assert backward == []
            continue
        by_layer = [expected_recomputed_calls(layer, block_size) for layer in layers]
        assert forward == [call for calls in by_layer for call in calls], (block_size, layers)
        # Layers are recomputed from the last to the first.
        assert backward == [call for calls in reversed(by_layer) for call in calls]


def test_the_calls_that_the_test_expects():
    assert expected_calls(range(4), 3) == [(3, [2, 1]), (3, [1, 2]), (2, [2])]
    assert expected_calls(range(1, 3), 3) == [(3, [1]), (3, [1, 2])]
    assert expected_calls(range(2, 4), 8) == [(8, [2, 2])]
    assert expected_recomputed_calls(1, 3) == [(1, [1]), (1, [1])]


def _operators_job():
    groups, calls = one_rank(), {}
    for mode, operator in (("baseline", "auto"), ("block", "plain"), ("block", "auto")):
        model = small_model(NUM_LAYERS, mode, 4)
        stack = stack_of(groups, model, operator)
        with phase_one_calls() as served, torch.no_grad():
            stack(entering(model, CHUNKS[0]), rotary_of(model))
        calls[mode, operator] = served
    return calls


def test_phase_one_is_for_the_two_phase_operator_and_that_is_the_cpu_s():
    (calls,) = run_ranks(_operators_job, 1)
    assert calls == {
        ("baseline", "auto"): [],
        ("block", "plain"): [],
        ("block", "auto"): [(4, [2, 2]), (4, [2, 2])],
    }


def _norms_job():
    """Sources and norms computed of them in a whole model's forward, by block size."""
    counts = {}
    groups = None
    for recompute in RECOMPUTE:
        for block_size in (1, 3, 4, 8):
            model = small_model(NUM_LAYERS, "full" if block_size == 1 else "block", block_size)
            case = Case(model, ParallelLayout(), recompute=recompute)
            groups, step = build(case, torch.float64, groups)
            batch = microbatches(case, 0)[0]
            with normed_sources() as normed:
                step.chunks[0].module(batch["tokens"], None, batch["labels"]).sum()
            counts[recompute, block_size] = len(normed), len({storage(one) for one in normed})
    return counts


def test_the_norm_of_a_completed_summary_is_computed_once_in_a_model():
    (counts,) = run_ranks(_norms_job, 1)
    for (recompute, block_size), (computed, distinct) in counts.items():
        # The embedding and every block: the output head reads them all.
        sources = 1 + -(-SUBLAYERS // block_size)
        assert computed == distinct == sources, (recompute, block_size)


def _memory_job(recompute):
    """Bytes that a forward leaves behind, by mode and block size, in sources' sizes."""
    groups, left = one_rank(), {}
    for mode, block_size in (("baseline", 4), *(("block", size) for size in BLOCK_SIZES)):
        model = replace(small_model(NUM_LAYERS, mode, block_size), hidden_size=128)
        stack = stack_of(groups, model, "auto", recompute=recompute)
        state, rotary = entering(model, CHUNKS[0]), rotary_of(model)
        with kept_for_backward() as kept:
            after = stack(state, rotary)
        held = [*kept, *after.readable(), *after.inverse_rms]
        own = apart_from(held, [*state.readable(), *rotary, *stack.parameters()])
        sizes = {storage(tensor): tensor.untyped_storage().nbytes() for tensor in own}
        source = after.readable()[-1]
        left[mode, block_size] = sum(sizes.values()) / (source.numel() * source.element_size())
    return left


def test_under_full_recomputation_a_model_keeps_the_baseline_s_tensors_and_the_summaries():
    (left,) = run_ranks(_memory_job, 1, "full")
    # The residual stream after every layer.
    assert left["baseline", 4] == NUM_LAYERS
    for block_size in BLOCK_SIZES:
        summaries = -(-SUBLAYERS // block_size)
        # A layer leaves a partial sum or a completed summary, not both, and a summary more where a
        # block ends inside it. Beside them, one number per token and source: its inverse RMS.
        inside = sum(ends_block(2 * layer, block_size) for layer in range(NUM_LAYERS))
        scalars = summaries / 128
        assert left["block", block_size] == pytest.approx(NUM_LAYERS + inside + scalars, rel=1e-12)
        assert left["block", block_size] <= left["baseline", 4] + summaries + scalars


def test_without_recomputation_much_more_is_kept():
    """So the measure sees what a layer keeps."""
    (left,) = run_ranks(_memory_job, 1, "none")
    assert min(left.values()) > 4 * NUM_LAYERS


def _inference_job():
    groups = one_rank()
    found = []
    for recompute in RECOMPUTE:
        model = small_model(NUM_LAYERS, "block", 3, recency_bias=0.7)
        stack = stack_of(groups, model, "two-phase", recompute=recompute)
        state = entering(model, CHUNKS[0])
        with_graph = stack(state, rotary_of(model)).readable()
        with torch.inference_mode():
            without = stack(state, rotary_of(model)).readable()
        found.append(
            [relative_error(one, other) for one, other in zip(without, with_graph, strict=True)]
        )
    return found


def test_outputs_do_not_depend_on_whether_a_graph_is_made():
    (found,) = run_ranks(_inference_job, 1)
    for differences in found:
        assert max(differences) < 1e-14
