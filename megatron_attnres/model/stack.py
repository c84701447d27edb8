"""The layers of one chunk."""

from collections.abc import Callable

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_attnres.depth_attention.module import BlockReaders, DepthAttention
from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.model.configuration import AttnResConfig
from megatron_attnres.model.dropout import HiddenDropout
from megatron_attnres.model.key_value_cache import KeyValueCache
from megatron_attnres.model.layer import Rotary, TransformerLayer
from megatron_attnres.pipeline.schedule import Recompute


class LayerStack(nn.ModuleDict):
    """Layers by their global index, so that parameter names do not depend on the layout.

    Args:
        config: Megatron-Core's configuration.
        attn_res: residual connections.
        groups: process groups; tp is used.
        layers: global indices of the chunk's layers.
        ends_block: tells for a global sublayer index whether a block is complete after it.
        recompute: ``full`` keeps of each layer only the depth state that enters it and what it
            adds; ``selective`` drops the core attention's activations.
    """

    def __init__(
        self,
        config: TransformerConfig,
        attn_res: AttnResConfig,
        groups: ProcessGroupCollection,
        layers: range,
        ends_block: Callable[[int], bool],
        recompute: Recompute,
    ) -> None:
        super().__init__(
            {
                str(layer): TransformerLayer(
                    config,
                    attn_res,
                    groups,
                    layer,
                    (ends_block(2 * layer), ends_block(2 * layer + 1)),
                    recompute == "selective",
                )
                for layer in layers
            }
        )
        self.recompute_layers = recompute == "full"
        has_blocks = attn_res.mode != "baseline"
        self._blocks = [
            tuple(
                self._block_of(sublayer, ends_block) if has_blocks else ()
                for sublayer in (2 * layer, 2 * layer + 1)
            )
            for layer in layers
        ]

    def forward(
        self,
        state: DepthState,
        rotary: Rotary,
        cache: KeyValueCache | None = None,
        dropout: HiddenDropout | None = None,
    ) -> DepthState:
        """The depth state after the chunk's layers.

        Args:
            state: before them.
            rotary: cosines and sines of the positions.
            cache: for inference.
            dropout: for training.
        """
        for layer, blocks in zip(self.values(), self._blocks, strict=True):
            if self.recompute_layers and torch.is_grad_enabled():
                state = _recomputed(layer, state, rotary, blocks, dropout)
            else:
                layer_cache = None if cache is None else cache.layer(layer.index)
                state = layer(state, rotary, blocks, layer_cache, dropout)
        return state

    def _block_of(self, sublayer: int, ends_block: Callable[[int], bool]) -> BlockReaders:
        """The readers of a sublayer's block, by layer; None for those of other chunks.

        A recomputed layer keeps to itself: what phase 1 finds for others would have to be stored.
        """
        first = last = sublayer
        while first > 0 and not ends_block(first - 1):
            first -= 1
        while not ends_block(last):
            last += 1
        if self.recompute_layers:
            layer = sublayer // 2
            first, last = max(first, 2 * layer), min(last, 2 * layer + 1)
        return tuple(
            tuple(self._reader(one) for one in range(first, last + 1) if one // 2 == layer)
            for layer in range(first // 2, last // 2 + 1)
        )

    def _reader(self, sublayer: int) -> DepthAttention | None:
        layer, is_mlp = divmod(sublayer, 2)
        if str(layer) not in self:
            return None
        return self[str(layer)].mlp_reader if is_mlp else self[str(layer)].attention_reader


def _recomputed(
    layer: nn.Module,
    state: DepthState,
    rotary: Rotary,
    blocks: tuple[BlockReaders, BlockReaders],
    dropout: HiddenDropout | None,
) -> DepthState:
    """Run a layer without keeping its activations; backward runs its forward again.

    Only what the layer adds to the state leaves the checkpoint: sources that it merely reads stay
    the caller's own tensors, whose gradients need no detour.
    """
    known, normed = len(state.sources), len(state.inverse_rms)

    def added(
        partial: Tensor | None, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor | None]:
        before = DepthState(tensors[:known], partial, tensors[known:])
        after = layer(before, rotary, blocks, dropout=dropout)
        return after.sources[known:], after.inverse_rms[normed:], after.partial

    completed, norms, partial = checkpoint(
        added,
        state.partial,
        *state.sources,
        *state.inverse_rms,
        use_reentrant=False,
        # Dropout makes the same masks again without it.
        preserve_rng_state=False,
    )
    return DepthState((*state.sources, *completed), partial, (*state.inverse_rms, *norms))
