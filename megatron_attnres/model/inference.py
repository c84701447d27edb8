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
        # Found once: to search the model for them takes longer than a token should.
        self._switches = _sequence_switches(model) if self._sharded else []
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
            with _switched_off(self._switches):
                state = self._model.run_layers(tokens, self.cache)
                return self._model.logits_of(_position(state, length - 1))
        # Later positions change nothing for earlier ones, and are overwritten by the next step.
        state = self._model.run_layers(pad(tokens, (0, padding)), self.cache)
        owner, place = divmod(length - 1, (length + padding) // ranks)
        hidden = self._model.final_hidden(_position(state, place))
        hidden = gather_from_sequence_parallel_region(hidden, group=self._group)
        with _switched_off(self._switches):
            return self._model.output(hidden[owner : owner + 1])[0]


def _position(state: DepthState, index: int) -> DepthState:
    """The depth state of one position."""
    if state.readable()[-1].shape[0] == 1:
        # A decode step's: slices would cost time, and what is known of its sources would be lost.
        return state
    partial = state.partial
    return DepthState(
        tuple(source[index : index + 1] for source in state.sources),
        None if partial is None else partial[index : index + 1],
    )


def _sequence_switches(model: GPTChunk) -> list[tuple[object, str]]:
    """Who keeps Megatron-Core's switch of sequence parallelism, and under which name."""
    switches: list[tuple[object, str]] = [(model.config, "sequence_parallel")]
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            switches.append((module, "sequence_parallel"))
        elif isinstance(module, VocabParallelEmbedding):
            switches.append((module, "reduce_scatter_embeddings"))
    return switches


@contextmanager
def _switched_off(switches: list[tuple[object, str]]) -> Iterator[None]:
    """Run without sequence parallelism: one token cannot be sharded."""
    for owner, name in switches:
        setattr(owner, name, False)
    try:
        yield
    finally:
        for owner, name in switches:
            setattr(owner, name, True)
