"""What a model is: its sizes and its residual connections. Plain data, no torch."""

from dataclasses import dataclass
from typing import Literal

from megatron_attnres.depth_attention.names import OperatorName

AttnResMode = Literal["baseline", "block", "full"]
SourceKind = Literal["delta", "cumulative"]


@dataclass(frozen=True)
class AttnResConfig:
    """How sublayers read from earlier depths (paper sections 3 and 4).

    Attributes:
        mode: ``baseline`` is standard residuals, ``block`` attends over block summaries, ``full``
            over every sublayer's output.
        block_size: S, sublayers per block. 1 in ``full`` mode, unused in ``baseline``.
        sources: ``delta`` (paper): a block's summary is the sum of its own sublayers' outputs.
            ``cumulative``: the running hidden state is never reset and its value at a block's end
            is the source.
        recency_bias: initial value of a learned scalar added to the logit of the newest source;
            None leaves the scalar out.
        operator: which implementation of depth attention runs; it does not change the model.
    """

    mode: AttnResMode = "block"
    block_size: int = 4
    sources: SourceKind = "delta"
    recency_bias: float | None = None
    operator: OperatorName = "auto"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the Transformer, under Megatron's names.

    ``vocab_size`` is the padded vocabulary: it depends on ``make_vocab_size_divisible_by`` alone,
    never on the layout, so that the full embedding is the same tensor under any tensor
    parallelism. ``kv_channels`` is the width of one attention head.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    seq_length: int
    norm_epsilon: float = 1e-6
    rotary_base: float = 10_000.0
    init_method_std: float = 0.02
    hidden_dropout: float = 0.0
    tied_embeddings: bool = True
    attn_res: AttnResConfig = AttnResConfig()

    @property
    def num_sublayers(self) -> int:
        """L: self-attention and MLP of every layer."""
        return 2 * self.num_layers


@dataclass(frozen=True)
class NamedSize:
    """The sizes behind one ``--model-size`` name; a flag of a field's name overrides it."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    rotary_base: float


NAMED_SIZES: dict[str, NamedSize] = {
    "tiny": NamedSize(8, 128, 384, 4, 2, 32, 10_000.0),
    "100m": NamedSize(12, 512, 1536, 8, 4, 64, 1_000_000.0),
    "0.6b": NamedSize(28, 1024, 3072, 16, 8, 128, 1_000_000.0),
}
