"""Parameters of a model, counted from its sizes. Pure arithmetic, no torch."""

from typing import NamedTuple

from megatron_attnres.model.configuration import ModelConfig

MATRICES_OF_SWIGLU = 3


class ParameterCount(NamedTuple):
    """How many parameters each part of the whole model has.

    Attributes:
        embedding: of the padded vocabulary.
        layers: matrices and norms of self-attention and MLP.
        depth_attention: pseudo-queries, key norms and recency biases, the head's included.
        final_norm: before the output layer.
        output: 0 where it is tied to the embedding.
    """

    embedding: int
    layers: int
    depth_attention: int
    final_norm: int
    output: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)

    @property
    def non_embedding(self) -> int:
        """Without the embedding and the output layer."""
        return self.layers + self.depth_attention + self.final_norm


def parameter_count(model: ModelConfig) -> ParameterCount:
    """The parameters of all ranks together, each counted once."""
    vocabulary = model.vocab_size * model.hidden_size
    return ParameterCount(
        embedding=vocabulary,
        layers=model.num_layers * layer_parameters(model),
        depth_attention=_depth_attention(model),
        final_norm=model.hidden_size,
        output=0 if model.tied_embeddings else vocabulary,
    )


def layer_parameters(model: ModelConfig) -> int:
    """One layer's, without what reads from depth."""
    hidden, width = model.hidden_size, model.kv_channels
    queries, groups = model.num_attention_heads * width, model.num_query_groups * width
    projections = hidden * (queries + 2 * groups) + queries * hidden
    mlp = MATRICES_OF_SWIGLU * hidden * model.ffn_hidden_size
    norms = 2 * hidden + 2 * width
    return projections + mlp + norms


def _depth_attention(model: ModelConfig) -> int:
    """A pseudo-query, a key norm and the bias, if any, of every sublayer and of the head."""
    if model.attn_res.mode == "baseline":
        return 0
    bias = 0 if model.attn_res.recency_bias is None else 1
    return (model.num_sublayers + 1) * (2 * model.hidden_size + bias)
