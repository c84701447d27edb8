"""FLOPs by arithmetic against those that torch counts while the model runs."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_attnres.model.configuration import NAMED_SIZES, AttnResConfig, ModelConfig
from megatron_attnres.model.flops import (
    depth_read_flops,
    layer_forward_flops,
    model_forward_flops,
    sources_read,
    training_flops,
)
from megatron_attnres.parallel.layout import ParallelLayout
from tests.distributed import restart_job, run_ranks
from tests.layouts import Case, build

TINY = ModelConfig(
    **vars(NAMED_SIZES["tiny"]), vocab_size=512, seq_length=64, attn_res=AttnResConfig("baseline")
)
MODES = {
    "baseline": AttnResConfig("baseline"),
    "blocks of 4": AttnResConfig("block", 4),
    "blocks of 3": AttnResConfig("block", 3),
    "full": AttnResConfig("full", 1),
}


MODELS = {name: replace(TINY, attn_res=attn_res) for name, attn_res in MODES.items()}
MODELS |= {
    f"100m, {mode}": replace(TINY, **vars(NAMED_SIZES["100m"]), attn_res=MODES[mode])
    for mode in ("baseline", "full")
}


def counted_flops(models):
    """Torch's count of one sequence's forward and of its training, by name; on a job's rank."""
    counts = {}
    for name, model in models.items():
        restart_job()
        _, step = build(Case(model, ParallelLayout()), torch.float32)
        tokens = torch.zeros(1, model.seq_length, dtype=torch.long)
        # The other kernels of a CPU are unknown to the counter.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            losses = step.chunks[0].module(tokens, None, tokens)
            forward = counter.get_total_flops()
            losses.sum().backward()
        counts[name] = (forward, counter.get_total_flops())
    return counts


@pytest.fixture(scope="module")
def counted():
    return run_ranks(counted_flops, 1, MODELS)[0]


@pytest.mark.parametrize("name", ["baseline", "full", "100m, baseline", "100m, full"])
def test_a_forward_is_what_torch_counts(counted, name):
    assert counted[name][0] == model_forward_flops(MODELS[name])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "full"])
def test_training_is_what_torch_counts_within_a_percent(counted, name):
    assert counted[name][1] == pytest.approx(training_flops(MODELS[name]), rel=0.01)


@pytest.mark.parametrize("name", ["full", "100m, full"])
def test_torch_sees_a_quarter_of_the_backward_of_full_reads(counted, name):
    """The operator's backward does the rest element by element, so that the counter sees none."""
    model = MODELS[name]
    reads = sum(
        depth_read_flops(sources, model.seq_length, model.hidden_size)
        for sources in sources_read(model)
    )
    assert counted[name][1] + 1.5 * reads == training_flops(model)


@pytest.mark.parametrize(("name", "partial_sums"), [("blocks of 4", 12), ("blocks of 3", 10)])
def test_torch_counts_all_but_the_partial_sums_of_blocks(counted, name, partial_sums):
    """They are merged element by element, so that torch's counter sees no product."""
    merged = partial_sums * depth_read_flops(1, TINY.seq_length, TINY.hidden_size)
    assert counted[name][0] + merged == model_forward_flops(MODELS[name])


def test_sublayers_read_the_embedding_summaries_and_the_partial_sum():
    small = replace(TINY, num_layers=3)
    assert sources_read(replace(small, attn_res=MODES["blocks of 4"])) == (1, 2, 2, 2, 2, 3, 3)
    assert sources_read(replace(small, attn_res=MODES["full"])) == (1, 2, 3, 4, 5, 6, 7)
    assert sources_read(replace(small, attn_res=MODES["baseline"])) == (0,) * 7


def test_a_layer_by_hand():
    model = replace(
        TINY,
        hidden_size=8,
        ffn_hidden_size=5,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=3,
        seq_length=10,
    )
    flops = layer_forward_flops(model)
    assert flops.projections == 2 * 10 * 8 * (12 + 6 + 6) + 2 * 10 * 12 * 8
    assert flops.core_attention == 2 * (2 * 4 * 10 * 10 * 3)
    assert flops.mlp == 3 * 2 * 10 * 8 * 5
    assert flops.total == sum(flops)


def test_a_training_step_is_three_forwards():
    assert training_flops(TINY) == 3 * model_forward_flops(TINY)
