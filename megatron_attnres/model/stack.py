"""The layers of one chunk."""

from collections.abc import Callable

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.model.configuration import AttnResConfig
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
                    (ends_block(2 * layer), ends_block(2 * layer + 1)),
                    recompute == "selective",
                )
                for layer in layers
            }
        )
        self.recompute_layers = recompute == "full"

    def forward(self, state: DepthState, rotary: Rotary) -> DepthState:
        """The depth state after the chunk's layers."""
        for layer in self.values():
            if self.recompute_layers and torch.is_grad_enabled():
                state = _recomputed(layer, state, rotary)
            else:
                state = layer(state, rotary)
        return state


def _recomputed(layer: nn.Module, state: DepthState, rotary: Rotary) -> DepthState:
    """Run a layer without keeping its activations; backward runs its forward again.

    Only what the layer adds to the state leaves the checkpoint: sources that it merely reads stay
    the caller's own tensors, whose gradients need no detour.
    """
    known = len(state.sources)

    def added(*tensors: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
        after = layer(DepthState(tensors[:-1], tensors[-1]), rotary)
        return after.sources[known:], after.partial

    completed, partial = checkpoint(
        added, *state.sources, state.partial, use_reentrant=False, preserve_rng_state=False
    )
    return DepthState((*state.sources, *completed), partial)
