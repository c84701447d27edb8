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


def counted_forwards(attn_res_by_name):
    """Torch's count of one sequence's forward, by name; runs on the rank of a job."""
    counts = {}
    for name, attn_res in attn_res_by_name.items():
        restart_job()
        model = replace(TINY, attn_res=attn_res)
        _, step = build(Case(model, ParallelLayout()), torch.float32)
        tokens = torch.zeros(1, model.seq_length, dtype=torch.long)
        # The other kernels of a CPU are unknown to the counter.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            step.chunks[0].module(tokens, None, tokens)
        counts[name] = counter.get_total_flops()
    return counts


@pytest.fixture(scope="module")
def counted():
    return run_ranks(counted_forwards, 1, MODES)[0]


def test_the_baseline_is_what_torch_counts(counted):
    assert counted["baseline"] == model_forward_flops(TINY)


def test_full_attention_residuals_are_what_torch_counts(counted):
    assert counted["full"] == model_forward_flops(replace(TINY, attn_res=MODES["full"]))


@pytest.mark.parametrize(("name", "partial_sums"), [("blocks of 4", 12), ("blocks of 3", 10)])
def test_torch_counts_all_but_the_partial_sums_of_blocks(counted, name, partial_sums):
    """They are merged element by element, so that torch's counter sees no product."""
    merged = partial_sums * depth_read_flops(1, TINY.seq_length, TINY.hidden_size)
    model = replace(TINY, attn_res=MODES[name])
    assert counted[name] + merged == model_forward_flops(model)


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
