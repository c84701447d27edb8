"""One Transformer layer whose two sublayers read from depth."""

from collections.abc import Callable

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_attnres.depth_attention.module import BlockReaders, DepthAttention, ResidualRead
from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.model.attention import SelfAttention
from megatron_attnres.model.configuration import AttnResConfig
from megatron_attnres.model.dropout import HiddenDropout
from megatron_attnres.model.key_value_cache import LayerCache
from megatron_attnres.model.mlp import SwiGLU
from megatron_attnres.model.norm import RMSNorm

Rotary = tuple[Tensor, Tensor]


def depth_reader(config: TransformerConfig, attn_res: AttnResConfig) -> nn.Module:
    """What reads the depth state on behalf of one sublayer or of the output head."""
    if attn_res.mode == "baseline":
        return ResidualRead()
    return DepthAttention(
        config.hidden_size,
        config.layernorm_epsilon,
        attn_res.recency_bias,
        config.params_dtype,
        attn_res.operator,
    )


class TransformerLayer(nn.Module):
    """Self-attention and MLP, each: read from depth, norm, compute, add to the block's sum.

    Args:
        config: Megatron-Core's configuration.
        attn_res: residual connections.
        groups: process groups; tp is used.
        index: of the layer in the whole model, from 0.
        ends_block: for self-attention and MLP, whether a block is complete after it. A block may
            end between the two.
        recompute_core_attention: see ``SelfAttention``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        attn_res: AttnResConfig,
        groups: ProcessGroupCollection,
        index: int,
        ends_block: tuple[bool, bool],
        recompute_core_attention: bool,
    ) -> None:
        super().__init__()
        self.index = index
        self.cumulative = attn_res.sources == "cumulative"
        self.attention_ends_block, self.mlp_ends_block = ends_block
        self.attention_reader = depth_reader(config, attn_res)
        self.attention_norm = _norm(config)
        self.attention = SelfAttention(config, groups, recompute_core_attention)
        self.mlp_reader = depth_reader(config, attn_res)
        self.mlp_norm = _norm(config)
        self.mlp = SwiGLU(config, groups)

    def forward(
        self,
        state: DepthState,
        rotary: Rotary,
        blocks: tuple[BlockReaders, BlockReaders],
        cache: LayerCache | None = None,
        dropout: HiddenDropout | None = None,
    ) -> DepthState:
        """The depth state after both sublayers.

        Args:
            state: before them.
            rotary: cosines and sines of the positions.
            blocks: for self-attention and MLP, the readers of its block that run here; phase 1
                serves all of them at once, when the first of them reads.
            cache: keys and values of earlier tokens, for inference.
            dropout: of both sublayers' outputs, for training.
        """

        def attend(hidden: Tensor) -> Tensor:
            return self.attention(self.attention_norm(hidden), rotary, cache)

        def transform(hidden: Tensor) -> Tensor:
            return self.mlp(self.mlp_norm(hidden))

        index = 2 * self.index
        attention = (index, self.attention_reader, blocks[0], attend, self.attention_ends_block)
        mlp = (index + 1, self.mlp_reader, blocks[1], transform, self.mlp_ends_block)
        return self._sublayer(self._sublayer(state, dropout, *attention), dropout, *mlp)

    def _sublayer(
        self,
        state: DepthState,
        dropout: HiddenDropout | None,
        index: int,
        reader: DepthAttention | ResidualRead,
        block: BlockReaders,
        compute: Callable[[Tensor], Tensor],
        ends_block: bool,
    ) -> DepthState:
        state = reader.look_ahead(state, block)
        output = compute(reader(state))
        if dropout is not None:
            output = dropout.drop(output, index)
        return state.add(output, ends_block=ends_block, cumulative=self.cumulative)


def _norm(config: TransformerConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.layernorm_epsilon, config.params_dtype)
