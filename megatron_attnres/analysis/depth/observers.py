"""Looks into a model while it computes: weights as readers read, the state after every layer."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from megatron_attnres.depth_attention import reference
from megatron_attnres.depth_attention.module import DepthAttention
from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.model.gpt import GPTChunk

# Of the copies that the plain form makes of a reader's sources at once.
_VALUES_AT_ONCE = 1 << 25


@contextmanager
def watching_weights(module: GPTChunk, take: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While the body runs, tell ``take`` of every read: the reader's place and its weights.

    Args:
        module: the whole model; no baseline.
        take: gets the place, in the order of reading and the head last, and p, [sources, s, b],
            float32 or wider.
    """

    def watch(place: int) -> Callable[[nn.Module, tuple[DepthState]], None]:
        return lambda reader, inputs: take(place, weights_of(reader, inputs[0]))

    with ExitStack() as hooks:
        for place, reader in enumerate(readers_of(module)):
            hooks.callback(reader.register_forward_pre_hook(watch(place)).remove)
        yield


@contextmanager
def watching_layers(module: GPTChunk, take: Callable[[Tensor], None]) -> Iterator[None]:
    """While the body runs, tell ``take`` of the state after every layer, in order.

    Args:
        module: the whole model.
        take: gets the running state, [s, b, h]: the residual stream of a baseline, otherwise the
            newest source, which may be a partial sum.
    """

    def watch(layer: nn.Module, inputs: tuple, state: DepthState) -> None:
        take(state.readable()[-1])

    with ExitStack() as hooks:
        for layer in module.layers.values():
            hooks.callback(layer.register_forward_hook(watch).remove)
        yield


def readers_of(module: GPTChunk) -> list[DepthAttention]:
    """In the order in which they read, the head last."""
    readers = [
        reader
        for layer in module.layers.values()
        for reader in (layer.attention_reader, layer.mlp_reader)
    ]
    return [*readers, module.head_reader]


@torch.no_grad()
def weights_of(reader: DepthAttention, state: DepthState) -> Tensor:
    """p, [sources, s, b], float32 or wider (``reference.depth_attention``)."""
    sources = state.readable()
    tokens = max(1, _VALUES_AT_ONCE // (len(sources) * sources[0][0].numel()))
    parts = [
        reference.depth_attention(
            [source[start : start + tokens] for source in sources],
            reader.query,
            reader.key_norm_weight,
            reader.eps,
            reader.recency_bias,
            return_weights=True,
        )[1]
        for start in range(0, sources[0].shape[0], tokens)
    ]
    return torch.cat(parts, dim=1)
