"""Floating-point operations of a model, counted from its sizes. Pure arithmetic, no torch.

Counted are matrix products, two operations per multiply and add: the projections, the core
attention, SwiGLU, the output head, and depth attention's logits and weighted sums. Core attention
counts whole, masked half included, as torch's FlopCounterMode does. Norms, activations, rotary
embedding, softmax, the embedding's look-up and additions are left out: they move memory.

All counts are of one sequence and of all tensor-parallel ranks together.
"""

from typing import NamedTuple

from megatron_attnres.model.configuration import ModelConfig

# Backward multiplies twice for every product of forward: once for each operand's gradient.
FORWARDS_PER_STEP = 3


class LayerFlops(NamedTuple):
    """One layer's forward without depth attention.

    Attributes:
        projections: queries, keys and values; the attention's output.
        core_attention: scores, and values weighted by them.
        mlp: SwiGLU's gate, up and down projection.
    """

    projections: int
    core_attention: int
    mlp: int

    @property
    def total(self) -> int:
        """All three."""
        return sum(self)


def layer_forward_flops(model: ModelConfig) -> LayerFlops:
    """One layer's forward, without what it reads from depth."""
    tokens, hidden, width = model.seq_length, model.hidden_size, model.kv_channels
    queries, groups = model.num_attention_heads * width, model.num_query_groups * width
    return LayerFlops(
        projections=2 * tokens * hidden * (queries + 2 * groups + queries),
        core_attention=2 * 2 * tokens * tokens * queries,
        mlp=2 * tokens * hidden * 3 * model.ffn_hidden_size,
    )


def head_forward_flops(model: ModelConfig) -> int:
    """The output projection's forward, without what it reads from depth."""
    return 2 * model.seq_length * model.hidden_size * model.vocab_size


def depth_read_flops(sources: int, tokens: int, hidden: int) -> int:
    """One read from depth: a product of every source with the query, and one with its weight."""
    return 2 * 2 * sources * tokens * hidden


def sources_read(model: ModelConfig) -> tuple[int, ...]:
    """How many sources every sublayer reads, in order, and last the head; zeros in the baseline."""
    sublayers = model.num_sublayers
    if model.attn_res.mode == "baseline":
        return (0,) * (sublayers + 1)
    size = 1 if model.attn_res.mode == "full" else model.attn_res.block_size
    # The embedding, the blocks before, and the partial sum but for a block's first sublayer.
    reads = tuple(1 + index // size + (index % size > 0) for index in range(sublayers))
    return (*reads, 1 + -(-sublayers // size))


def model_forward_flops(model: ModelConfig) -> int:
    """The whole model's forward, reads from depth included."""
    reads = sum(
        depth_read_flops(sources, model.seq_length, model.hidden_size)
        for sources in sources_read(model)
    )
    layers = model.num_layers * layer_forward_flops(model).total
    return layers + head_forward_flops(model) + reads


def training_flops(model: ModelConfig) -> int:
    """Forward and backward of the whole model; recomputed activations count nothing."""
    return FORWARDS_PER_STEP * model_forward_flops(model)
