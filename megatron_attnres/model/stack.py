"""The layers of one chunk."""

from collections.abc import Callable

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.model.configuration import AttnResConfig
from megatron_attnres.model.key_value_cache import KeyValueCache
from megatron_attnres.model.layer import Readers, Rotary, TransformerLayer
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
                    (ends_block(2 * layer), ends_block(2 * layer + 1)),
                    recompute == "selective",
                )
                for layer in layers
            }
        )
        self.recompute_layers = recompute == "full"
        self._readers = self._readers_ahead()

    def forward(
        self, state: DepthState, rotary: Rotary, cache: KeyValueCache | None = None
    ) -> DepthState:
        """The depth state after the chunk's layers; ``cache`` is for inference."""
        for (name, layer), readers in zip(self.items(), self._readers, strict=True):
            if self.recompute_layers and torch.is_grad_enabled():
                state = _recomputed(layer, state, rotary, readers)
            else:
                layer_cache = None if cache is None else cache.layer(int(name))
                state = layer(state, rotary, readers, layer_cache)
        return state

    def _readers_ahead(self) -> list[tuple[Readers, Readers]]:
        """For each layer's two sublayers, the readers that phase 1 serves together.

        They are those of the same block and layer. Products round by their shape, and no layout
        cuts a layer: so every layout gives one process's losses to the last bit, and a recomputed
        layer stores nothing for later ones.
        """
        found = []
        for layer in self.values():
            mlp = (layer.mlp_reader,)
            attention = (layer.attention_reader,)
            found.append((attention if layer.attention_ends_block else attention + mlp, mlp))
        return found


def _recomputed(
    layer: nn.Module, state: DepthState, rotary: Rotary, readers: tuple[Readers, Readers]
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
        after = layer(before, rotary, readers)
        return after.sources[known:], after.inverse_rms[normed:], after.partial

    completed, norms, partial = checkpoint(
        added,
        state.partial,
        *state.sources,
        *state.inverse_rms,
        use_reentrant=False,
        preserve_rng_state=False,
    )
    return DepthState((*state.sources, *completed), partial, (*state.inverse_rms, *norms))
