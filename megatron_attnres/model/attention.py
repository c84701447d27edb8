"""Grouped-query self-attention over Megatron-Core's tensor-parallel projections."""

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_attnres.model.norm import RMSNorm
from megatron_attnres.model.rotary import apply_rotary
from megatron_attnres.parallel.parameters import Sharding, mark_partial_gradient, mark_sharded


class SelfAttention(nn.Module):
    """Causal self-attention with QK norm and rotary embedding.

    The fused projection's rows lie by query group: each group's query heads, then its key head,
    then its value head, so that a tensor-parallel slice holds whole groups.

    Args:
        config: Megatron-Core's configuration.
        groups: process groups; tp is used.
        recompute_core: drop the attention's own activations and compute them again in backward
            (Megatron's ``--recompute-granularity selective``).
    """

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, recompute_core: bool
    ) -> None:
        super().__init__()
        self.recompute_core = recompute_core
        self.head_width = config.kv_channels
        self.groups = config.num_query_groups // groups.tp.size()
        self.queries_per_group = config.num_attention_heads // config.num_query_groups
        rows = (config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            rows,
            config=config,
            init_method=config.init_method,
            bias=False,
            tp_group=groups.tp,
        )
        self.linear_proj = RowParallelLinear(
            config.num_attention_heads * config.kv_channels,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=groups.tp,
        )
        self.q_norm = RMSNorm(config.kv_channels, config.layernorm_epsilon, config.params_dtype)
        self.k_norm = RMSNorm(config.kv_channels, config.layernorm_epsilon, config.params_dtype)
        mark_sharded(self.linear_qkv.weight, Sharding(0))
        mark_sharded(self.linear_proj.weight, Sharding(1))
        mark_partial_gradient(self.q_norm.weight)
        mark_partial_gradient(self.k_norm.weight)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """[s, b, h] (s / TP under sequence parallelism) in and out."""
        mixed, _ = self.linear_qkv(hidden)
        query, key, value = self._split_heads(mixed)
        query = apply_rotary(self.q_norm(query), rotary)
        key = apply_rotary(self.k_norm(key), rotary)
        if self.recompute_core and torch.is_grad_enabled():
            context = checkpoint(
                causal_attention, query, key, value, use_reentrant=False, preserve_rng_state=False
            )
        else:
            context = causal_attention(query, key, value)
        output, _ = self.linear_proj(context)
        return output

    def _split_heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, b, heads / TP, d], keys and values [s, b, groups / TP, d]."""
        s, b, _ = mixed.shape
        grouped = mixed.view(s, b, self.groups, self.queries_per_group + 2, self.head_width)
        query, key, value = grouped.split((self.queries_per_group, 1, 1), dim=3)
        return query.flatten(2, 3), key.squeeze(3), value.squeeze(3)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Torch's scaled-dot-product attention; no [s, s] mask or matrix is kept in memory.

    Args:
        query: [s, b, heads, d].
        key: [s, b, groups, d].
        value: [s, b, groups, d].

    Returns:
        [s, b, heads x d].
    """
    # [s, b, n, d] -> [b, n, s, d]
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    context = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return context.permute(2, 0, 1, 3).flatten(2)
