"""Grouped-query self-attention over Megatron-Core's tensor-parallel projections."""

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_attnres.model.key_value_cache import LayerCache
from megatron_attnres.model.norm import RMSNorm
from megatron_attnres.model.rotary import apply_rotary, rotary_at
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

    def forward(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], cache: LayerCache | None = None
    ) -> Tensor:
        """Attend within the sequence, or with a cache also to the tokens of earlier steps.

        Args:
            hidden: [s, b, h] (s / TP under sequence parallelism).
            rotary: tables of at least the positions that the tokens have.
            cache: for inference: the tokens follow those that it holds, and are written into it.

        Returns:
            Of hidden's shape.

        Raises:
            ValueError: the tokens do not fit the tables or the cache.
        """
        mixed, _ = self.linear_qkv(hidden)
        query, key, value = self._split_heads(mixed)
        rotary = rotary_at(rotary, 0 if cache is None else cache.length, query.shape[0])
        query = apply_rotary(self.q_norm(query), rotary)
        key = apply_rotary(self.k_norm(key), rotary)
        if cache is not None:
            context = cached_attention(query, key, value, cache)
        elif self.recompute_core and torch.is_grad_enabled():
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


def cached_attention(query: Tensor, key: Tensor, value: Tensor, cache: LayerCache) -> Tensor:
    """Write a step's keys and values into the cache and attend to everything in it.

    Args:
        query: [s, b, heads, d].
        key: [s, b, groups, d].
        value: [s, b, groups, d].
        cache: what the tokens before the step left.

    Returns:
        [s, b, heads x d].

    Raises:
        ValueError: the tokens do not fit the cache.
    """
    keys, values = cache.write(key, value)
    if cache.length == 0:
        return causal_attention(query, key, value)
    if query.shape[0] == 1:
        return _token_attention(query, keys, values)
    return _piece_attention(query, keys, values)


def _token_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one token, which sees every position.

    The query heads of a group take the place of query positions. They lie in that order already,
    and kernels read a group's keys once for all its heads (in bfloat16 on CPUs that is several
    times faster than grouped queries of one position).

    Args:
        query: [1, b, heads, d].
        keys: [b, groups, positions, d].
        values: [b, groups, positions, d].

    Returns:
        [1, b, heads x d].
    """
    _, b, _, d = query.shape
    grouped = query.view(b, keys.shape[1], -1, d)
    return F.scaled_dot_product_attention(grouped, keys, values).reshape(1, b, -1)


def _piece_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of several tokens that follow earlier ones.

    Args:
        query: [s, b, heads, d], of the last s positions.
        keys: [b, groups, positions, d].
        values: [b, groups, positions, d].

    Returns:
        [s, b, heads x d].
    """
    s, b, _, d = query.shape
    groups, positions = keys.shape[1:3]
    # As for one token, the query heads of a group are query positions, s times as many: CUDA's
    # memory-efficient kernel takes a mask but no grouped queries.
    grouped = query.view(s, b, groups, -1, d).permute(1, 2, 0, 3, 4).flatten(2, 3)
    seen = torch.ones(s, positions, dtype=torch.bool, device=query.device).tril(positions - s)
    mask = seen.repeat_interleave(grouped.shape[2] // s, dim=0)
    context = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return context.unflatten(2, (s, -1)).permute(2, 0, 1, 3, 4).flatten(2)
