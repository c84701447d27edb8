"""Next-token logits of a whole model: a prompt in one or several pieces, then token by token.

Depth attention reads only a token's own sources, so what a step keeps of them lives in its depth
state and ends with it; keys and values are what outlives a step. Under sequence parallelism a
piece's sources are sharded over the tensor-parallel ranks like its activations (N T h / TP values
on each), and every rank reads depth for its own tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.nn.functional import pad

from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.model.gpt import GPTChunk
from megatron_attnres.model.key_value_cache import KeyValueCache


class Decoder:
    """A batch of sequences of equal length that grows.

    Attributes:
        cache: keys and values of the tokens so far.

    Args:
        model: all of it; tensor and sequence parallelism may be on.
        batch_size: b.
        max_length: tokens to make room for, at most the model's seq_length.

    Raises:
        ValueError: the chunk is not a whole model, or has fewer positions.
    """

    def __init__(self, model: GPTChunk, batch_size: int, max_length: int) -> None:
        if not (model.is_first and model.is_last):
            raise ValueError(
                "inference needs the whole model in one pipeline stage: "
                "build it with pipeline-model-parallel-size 1"
            )
        positions = model.rotary_cosines.shape[0]
        if max_length > positions:
            raise ValueError(
                f"max_length {max_length} exceeds the {positions} positions of the model: "
                f"build it with seq_length {max_length} or more"
            )
        self._model = model
        self._group = model.groups.tp
        self._sharded = model.config.sequence_parallel
        attention = next(iter(model.layers.values())).attention
        with torch.inference_mode():
            self.cache = KeyValueCache(
                range(len(model.layers)),
                batch_size,
                max_length,
                attention.groups,
                attention.head_width,
                model.config.params_dtype,
                model.rotary_cosines.device,
            )

    @torch.inference_mode()
    def next_logits(self, tokens: Tensor) -> Tensor:
        """Append tokens and say what may follow them.

        Args:
            tokens: [b, s], the same on all tensor-parallel ranks.

        Returns:
            Logits of the token after the last one, [b, vocabulary] float32, on every rank.

        Raises:
            ValueError: the tokens do not fit ``max_length``.
        """
        length = tokens.shape[1]
        self.cache.end_of_step(length)
        if self._sharded:
            logits = self._sharded_logits(tokens)
        else:
            state = self._model.run_layers(tokens, self.cache)
            logits = self._model.logits_of(_position(state, length - 1))
        self.cache.advance(length)
        return gather_from_tensor_model_parallel_region(logits[0], group=self._group).float()

    def _sharded_logits(self, tokens: Tensor) -> Tensor:
        """Run the layers on shards of the sequence, the head on its last position."""
        length, ranks = tokens.shape[1], self._group.size()
        padding = -length % ranks
        if length == 1 or self.cache.length + length + padding > self.cache.max_length:
            with _whole_sequences(self._model):
                state = self._model.run_layers(tokens, self.cache)
                return self._model.logits_of(_position(state, length - 1))
        # Later positions change nothing for earlier ones, and are overwritten by the next step.
        state = self._model.run_layers(pad(tokens, (0, padding)), self.cache)
        owner, place = divmod(length - 1, (length + padding) // ranks)
        hidden = self._model.final_hidden(_position(state, place))
        hidden = gather_from_sequence_parallel_region(hidden, group=self._group)
        with _whole_sequences(self._model):
            return self._model.output(hidden[owner : owner + 1])[0]


def _position(state: DepthState, index: int) -> DepthState:
    """The depth state of one position."""
    partial = state.partial
    return DepthState(
        tuple(source[index : index + 1] for source in state.sources),
        None if partial is None else partial[index : index + 1],
    )


@contextmanager
def _whole_sequences(model: GPTChunk) -> Iterator[None]:
    """Switch sequence parallelism off: one token cannot be sharded."""
    linears = [
        module
        for module in model.modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    ]
    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    _switch(model, linears, embeddings, False)
    try:
        yield
    finally:
        _switch(model, linears, embeddings, True)


def _switch(
    model: GPTChunk,
    linears: list[ColumnParallelLinear | RowParallelLinear],
    embeddings: list[VocabParallelEmbedding],
    on: bool,
) -> None:
    model.config.sequence_parallel = on
    for linear in linears:
        linear.sequence_parallel = on
    for embedding in embeddings:
        embedding.reduce_scatter_embeddings = on
