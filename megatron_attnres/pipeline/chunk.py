"""A model chunk as Megatron-Core's schedules see it."""

from typing import Any

from megatron.core.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_attnres.pipeline.payload import pack, unpack
from megatron_attnres.pipeline.plan import ChunkPlan, PipelinePlan


class PipelineChunk(nn.Module):
    """Unpacks what the hop before brought, runs the model's chunk, packs what the next one carries.

    Args:
        module: called as ``module(tokens, state, labels)``; returns a depth state, or the losses
            in the last chunk. A state is a pair (sources, partial sum).
        state_type: makes the module's state from the pair.
        config: Megatron-Core's configuration.
        plan: the pipeline plan.
        chunk: this chunk of it.
    """

    model_type = ModelType.encoder_or_decoder

    def __init__(
        self,
        module: nn.Module,
        state_type: type,
        config: TransformerConfig,
        plan: PipelinePlan,
        chunk: ChunkPlan,
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.vp_stage = chunk.virtual_stage if plan.virtual_size > 1 else None
        self._state_type = state_type
        self._hop_in = plan.hops[chunk.index - 1] if chunk.index > 0 else None
        self._hop_out = plan.hops[chunk.index] if chunk.index < len(plan.hops) else None
        self._input: Tensor | None = None

    @property
    def is_first(self) -> bool:
        """Whether the chunk embeds the tokens."""
        return self._hop_in is None

    @property
    def is_last(self) -> bool:
        """Whether the chunk computes the loss."""
        return self._hop_out is None

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Called by the schedules with what was received, before ``forward``."""
        # 1F1B hands over a list per received tensor shape, of which there is one.
        (self._input,) = input_tensor

    def forward(self, tokens: Tensor | None, labels: Tensor | None) -> Any:
        """The packed entries of the next hop, or the losses [b, s] of the last chunk."""
        state = None
        if self._hop_in is not None:
            state = self._state_type(*unpack(self._input, self._hop_in))
        self._input = None
        result = self.module(tokens, state, labels)
        return result if self._hop_out is None else pack(*result, self._hop_out)
