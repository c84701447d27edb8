"""Qwen3 with Attention Residuals (arXiv:2603.15031), for transformers.

A Transformer adds every sublayer's output to one residual stream. Here a sublayer (self-attention
or MLP) reads a mixture of what earlier depths have made instead. For a learned pseudo-query w, a
learned key-norm weight g and sources v_0 .. v_k:

    h = sum_i p_i v_i        p = softmax_i( w . RMSNorm(v_i; g) )

v_0 is the token embedding. ``attn_res_block_size`` consecutive sublayers make a block, and a
completed block is a source; within a block, its running sum is the newest one. The output head
reads the completed blocks. With ``attn_res_recency_bias`` a learned scalar is added to the newest
source's logit.

``attn_res_sources`` says what a block adds up: ``delta``, the outputs of its own sublayers, or
``cumulative``, those of all sublayers so far and the embedding.

Everything else is Qwen3's. A token reads sources of its own only, so they end with the forward
pass: keys and values are all that a cache holds.

Needs torch and transformers 4.57 or later.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3ForCausalLM,
    Qwen3MLP,
    Qwen3Model,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)


class AttnResConfig(Qwen3Config):
    """Qwen3's configuration, and how sublayers read from depth.

    Attributes:
        attn_res_mode: ``block``; or ``full``, where every sublayer is a block.
        attn_res_block_size: sublayers per block, two of which make a layer.
        attn_res_sources: ``delta`` or ``cumulative``.
        attn_res_recency_bias: whether the newest source's logit has a learned bias.
    """

    model_type = "attnres"

    attn_res_mode: str = "block"
    attn_res_block_size: int = 4
    attn_res_sources: str = "delta"
    attn_res_recency_bias: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse what the model does not know."""
        super().__post_init__(**kwargs)
        for field, allowed in (
            ("attn_res_mode", ("block", "full")),
            ("attn_res_sources", ("delta", "cumulative")),
        ):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} {getattr(self, field)!r}: must be one of {allowed}")
        size = self.attn_res_block_size
        if size < 1 or (self.attn_res_mode == "full" and size != 1):
            raise ValueError(
                f"attn_res_block_size {size}: must be above 0, and 1 for attn_res_mode full"
            )

    def ends_block(self, sublayer: int) -> bool:
        """Whether a block is complete after a sublayer, counted over the whole model from 0."""
        number = sublayer + 1
        return number % self.attn_res_block_size == 0 or number == 2 * self.num_hidden_layers


def depth_attention(
    sources: tuple[Tensor, ...],
    query: Tensor,
    key_norm_weight: Tensor,
    eps: float,
    recency_bias: Tensor | None = None,
) -> Tensor:
    """Mix sources: h = sum_i p_i v_i with p = softmax_i( w . RMSNorm(v_i; g) ).

    RMS, logits and softmax are computed in float32; values are mixed as they are, not normalised.

    Args:
        sources: v_0 .. v_k, oldest first, each [batch, tokens, h].
        query: w, [1, h].
        key_norm_weight: g, [h].
        eps: added to a source's mean square.
        recency_bias: a scalar on the newest (last) source's logit.

    Returns:
        h, [batch, tokens, h].
    """
    values = torch.stack(sources)
    wide = values.float()
    # w . RMSNorm(v; g) = (w g) . v / rms(v)
    direction = query.flatten().float() * key_norm_weight.float()
    logits = (wide @ direction) * torch.rsqrt(wide.square().mean(-1) + eps)
    if recency_bias is not None:
        logits = torch.cat((logits[:-1], logits[-1:] + recency_bias.float()))
    weights = logits.softmax(dim=0)
    return torch.einsum("kbt,kbth->bth", weights, wide).to(values.dtype)


class Depth(NamedTuple):
    """What takes the place of the residual stream.

    Attributes:
        newest: the running sum of the block being computed; at a block's start, the source that
            was completed last. Layers hand it out as their hidden state.
        older: the sources before it, oldest first.
        in_block: whether ``newest`` is a running sum.
    """

    newest: Tensor
    older: tuple[Tensor, ...] = ()
    in_block: bool = False

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """What a sublayer reads, newest last."""
        return (*self.older, self.newest)

    def add(self, output: Tensor, ends_block: bool, cumulative: bool) -> "Depth":
        """The state after a sublayer."""
        total = self.newest + output if self.in_block or cumulative else output
        return Depth(total, self.older if self.in_block else self.sources, not ends_block)


class PseudoQuery(nn.Module):
    """w of one reader, [1, h]; zero at first, which reads all sources alike."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))


class AttnResDecoderLayer(GradientCheckpointingLayer):
    """Self-attention and MLP, each: read from depth, norm, compute, add to the block's sum."""

    def __init__(self, config: AttnResConfig, layer_idx: int) -> None:
        super().__init__()
        self.cumulative = config.attn_res_sources == "cumulative"
        self.attention_ends_block = config.ends_block(2 * layer_idx)
        self.mlp_ends_block = config.ends_block(2 * layer_idx + 1)
        # By which some releases choose the mask.
        self.attention_type = "full_attention"

        self.attn_res_proj, self.attn_res_norm, self.attn_res_bias = _reader(config)
        self.input_layernorm = _norm(config)
        self.self_attn = Qwen3Attention(config, layer_idx)

        self.mlp_res_proj, self.mlp_res_norm, self.mlp_res_bias = _reader(config)
        self.post_attention_layernorm = _norm(config)
        self.mlp = Qwen3MLP(config)

    def forward(self, depth: Depth | Tensor, **attention: Any) -> Depth:
        """The state after both sublayers.

        Args:
            depth: before them; the token embedding for the first layer.
            attention: mask, rotary embedding, cache, whatever Qwen3Attention takes.
        """
        if isinstance(depth, Tensor):
            depth = Depth(depth)

        hidden = _read(depth, self.attn_res_proj, self.attn_res_norm, self.attn_res_bias)
        output, _ = self.self_attn(hidden_states=self.input_layernorm(hidden), **attention)
        depth = depth.add(output, self.attention_ends_block, self.cumulative)

        hidden = _read(depth, self.mlp_res_proj, self.mlp_res_norm, self.mlp_res_bias)
        output = self.mlp(self.post_attention_layernorm(hidden))
        return depth.add(output, self.mlp_ends_block, self.cumulative)


class AttnResPreTrainedModel(Qwen3PreTrainedModel):
    """What the classes below have in common."""

    config_class = AttnResConfig
    _no_split_modules: ClassVar[list[str]] = ["AttnResDecoderLayer"]
    _can_record_outputs: ClassVar[dict[str, type]] = {
        "hidden_states": AttnResDecoderLayer,
        "attentions": Qwen3Attention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PseudoQuery):
            nn.init.zeros_(module.weight)
        if isinstance(module, AttnResDecoderLayer | AttnResModel):
            for bias in module.parameters(recurse=False):
                nn.init.zeros_(bias)


class AttnResModel(AttnResPreTrainedModel, Qwen3Model):
    """Qwen3Model, whose layers hand on the depth state where Qwen3's hand on a hidden state."""

    def __init__(self, config: AttnResConfig) -> None:
        # Not Qwen3Model's: it would make layers of its own.
        Qwen3PreTrainedModel.__init__(self, config)
        self.padding_idx = config.pad_token_id
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            AttnResDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.output_attn_res_proj, self.output_attn_res_norm, self.output_attn_res_bias = _reader(
            config
        )
        self.norm = _norm(config)
        # Qwen3Model's forward ends with the norm of what the last layer has handed on.
        self.norm.register_forward_pre_hook(self._read_for_output)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.has_sliding_layers = False
        self.post_init()

    def _read_for_output(self, norm: nn.Module, arguments: tuple[Depth]) -> Tensor:
        (depth,) = arguments
        return _read(
            depth, self.output_attn_res_proj, self.output_attn_res_norm, self.output_attn_res_bias
        )


class AttnResForCausalLM(AttnResPreTrainedModel, Qwen3ForCausalLM):
    """Qwen3ForCausalLM over an AttnResModel."""

    def __init__(self, config: AttnResConfig) -> None:
        Qwen3PreTrainedModel.__init__(self, config)
        self.model = AttnResModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def _reader(config: AttnResConfig) -> tuple[PseudoQuery, Qwen3RMSNorm, nn.Parameter | None]:
    """Pseudo-query, key norm and recency bias of one reader."""
    bias = nn.Parameter(torch.zeros(())) if config.attn_res_recency_bias else None
    return PseudoQuery(config.hidden_size), _norm(config), bias


def _read(
    depth: Depth, query: PseudoQuery, key_norm: Qwen3RMSNorm, recency_bias: Tensor | None
) -> Tensor:
    return depth_attention(
        depth.sources, query.weight, key_norm.weight, key_norm.variance_epsilon, recency_bias
    )


def _norm(config: AttnResConfig) -> Qwen3RMSNorm:
    return Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
