"""A Transformer layer on one rank, to time other things against."""

from collections.abc import Callable
from datetime import timedelta

import torch

from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.model.configuration import AttnResConfig, ModelConfig
from megatron_attnres.model.layer import TransformerLayer
from megatron_attnres.model.megatron_config import megatron_config
from megatron_attnres.model.rotary import rotary_tables
from megatron_attnres.parallel.cpu import device
from megatron_attnres.parallel.groups import (
    ParallelGroups,
    initialize_distributed,
    initialize_groups,
)
from megatron_attnres.parallel.layout import ParallelLayout

HEAD_WIDTH = 64


def single_rank_groups() -> ParallelGroups:
    """Make this process a job of one rank."""
    timeout = timedelta(minutes=1)
    initialize_distributed(timeout, None)
    return initialize_groups(ParallelLayout(), timeout)


def baseline_layer(
    hidden: int, tokens: int, dtype: torch.dtype, groups: ParallelGroups
) -> Callable[[], None]:
    """Forward and backward of one layer with standard residuals.

    Args:
        hidden: h, a multiple of 64; heads are 64 wide, two share a key head, the MLP is 3 h wide.
        tokens: of one sequence.
        dtype: of parameters and activations.
        groups: of one rank.
    """
    heads = hidden // HEAD_WIDTH
    model = ModelConfig(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=3 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads // 2 if heads % 2 == 0 else heads,
        kv_channels=HEAD_WIDTH,
        vocab_size=128,
        seq_length=tokens,
        attn_res=AttnResConfig("baseline"),
    )
    config = megatron_config(model, groups.layout, dtype, 1, overlap_p2p=False)
    layer = TransformerLayer(
        config, model.attn_res, groups.collection, (False, False), recompute_core_attention=False
    ).to(device())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=model.init_method_std)
    rotary = rotary_tables(tokens, HEAD_WIDTH, model.rotary_base, dtype, device())
    stream = torch.randn(tokens, 1, hidden, dtype=dtype, device=device(), requires_grad=True)

    readers = ((layer.attention_reader,), (layer.mlp_reader,))

    def run() -> None:
        output = layer(DepthState((), stream), rotary, readers).partial
        torch.autograd.grad(output, [stream, *layer.parameters()], torch.ones_like(output))

    return run
