"""Which tensors of a Hugging Face folder make up which of ours. Pure arithmetic, no torch.

Names are Qwen3's, whose layers ours are. What reads from depth comes beside them:

    ours                                      theirs, below model.layers.I.
    layers.I.attention_reader.query           attn_res_proj.weight   [1, h]
    layers.I.attention_reader.key_norm_weight attn_res_norm.weight   [h]
    layers.I.attention_reader.recency_bias    attn_res_bias          scalar
    layers.I.mlp_reader.*                     mlp_res_*
    head_reader.*                             model.output_attn_res_*
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_attnres.model.configuration import ModelConfig

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
HEAD_READER = "head_reader"
RECENCY_BIAS = "recency_bias"


@dataclass(frozen=True)
class Named:
    """A whole tensor."""

    name: str
    shape: Shape

    @property
    def numel(self) -> int:
        """Its numbers."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Correspondence:
    """One tensor of ours and those of the folder that hold the same numbers.

    Attributes:
        ours: global parameter name and shape of the whole tensor.
        theirs: in the order in which their rows lie in ours.
        groups: ours is this many groups of rows, each of which takes its share of rows from every
            one of theirs in turn. 1 stacks them; the fused query, key and value projection has a
            group per key head. Where there is one of theirs, only the shape may differ.
    """

    ours: Named
    theirs: tuple[Named, ...]
    groups: int = 1


def correspondences(model: ModelConfig, head_reader: bool = True) -> list[Correspondence]:
    """All tensors of a model, each of either side exactly once.

    Args:
        model: sizes and residual connections; ``baseline`` is plain Qwen3.
        head_reader: whether the folder has the tensors by which the output head reads from depth.
    """
    h, vocabulary = model.hidden_size, model.vocab_size
    found = [_one("embedding.weight", EMBEDDING, (vocabulary, h))]
    for layer in range(model.num_layers):
        found += _layer(model, layer)
    if head_reader:
        found += _reader(model, HEAD_READER, "model.output_attn_res")
    found.append(_one("final_norm.weight", "model.norm.weight", (h,)))
    if not model.tied_embeddings:
        found.append(_one("output.weight", OUTPUT, (vocabulary, h)))
    return found


def reader_of(model: ModelConfig, sublayer: int) -> str:
    """The name of what reads from depth for a sublayer, counted over the whole model."""
    layer, is_mlp = divmod(sublayer, 2)
    return f"layers.{layer}.{'mlp' if is_mlp else 'attention'}_reader"


def _layer(model: ModelConfig, layer: int) -> Iterator[Correspondence]:
    h, d, intermediate = model.hidden_size, model.kv_channels, model.ffn_hidden_size
    ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
    queries, keys = model.num_attention_heads * d, model.num_query_groups * d

    yield from _reader(model, f"{ours}attention_reader", f"{theirs}attn_res")
    yield _one(f"{ours}attention_norm.weight", f"{theirs}input_layernorm.weight", (h,))
    attention = f"{theirs}self_attn."
    yield Correspondence(
        Named(f"{ours}attention.linear_qkv.weight", (queries + 2 * keys, h)),
        (
            Named(f"{attention}q_proj.weight", (queries, h)),
            Named(f"{attention}k_proj.weight", (keys, h)),
            Named(f"{attention}v_proj.weight", (keys, h)),
        ),
        groups=model.num_query_groups,
    )
    yield _one(f"{ours}attention.q_norm.weight", f"{attention}q_norm.weight", (d,))
    yield _one(f"{ours}attention.k_norm.weight", f"{attention}k_norm.weight", (d,))
    yield _one(f"{ours}attention.linear_proj.weight", f"{attention}o_proj.weight", (h, queries))

    yield from _reader(model, f"{ours}mlp_reader", f"{theirs}mlp_res")
    yield _one(f"{ours}mlp_norm.weight", f"{theirs}post_attention_layernorm.weight", (h,))
    yield Correspondence(
        Named(f"{ours}mlp.linear_fc1.weight", (2 * intermediate, h)),
        (
            Named(f"{theirs}mlp.gate_proj.weight", (intermediate, h)),
            Named(f"{theirs}mlp.up_proj.weight", (intermediate, h)),
        ),
    )
    yield _one(f"{ours}mlp.linear_fc2.weight", f"{theirs}mlp.down_proj.weight", (h, intermediate))


def _reader(model: ModelConfig, ours: str, theirs: str) -> Iterator[Correspondence]:
    if model.attn_res.mode == "baseline":
        return
    h = model.hidden_size
    yield _one(f"{ours}.query", f"{theirs}_proj.weight", (h,), (1, h))
    yield _one(f"{ours}.key_norm_weight", f"{theirs}_norm.weight", (h,))
    if model.attn_res.recency_bias is not None:
        yield _one(f"{ours}.{RECENCY_BIAS}", f"{theirs}_bias", (1,), ())


def _one(ours: str, theirs: str, shape: Shape, their_shape: Shape | None = None) -> Correspondence:
    their_shape = shape if their_shape is None else their_shape
    return Correspondence(Named(ours, shape), (Named(theirs, their_shape),))
