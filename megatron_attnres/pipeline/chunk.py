"""A model chunk as Megatron-Core's schedules see it."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_attnres.pipeline.boundary import ChunkBoundary


class PipelineChunk(nn.Module):
    """Takes in what the last hop brought, runs the model's chunk, packs what the next carries.

    Args:
        module: called as ``module(tokens, state, labels, samples)``; returns a depth state, or what
            the last chunk makes of it: losses in training.
        state_type: a tuple that begins with sources, partial sum and statistics of the sources, and
            is made of these.
        config: Megatron-Core's configuration.
        boundary: the chunk's edges.
        virtual_stage: None without interleaving.
    """

    model_type = ModelType.encoder_or_decoder

    def __init__(
        self,
        module: nn.Module,
        state_type: type,
        config: TransformerConfig,
        boundary: ChunkBoundary,
        virtual_stage: int | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.boundary = boundary
        self.vp_stage = virtual_stage
        self._state_type = state_type
        self._input: Tensor | None = None
        self._samples: Iterator[Sequence[int]] = iter(())

    @property
    def is_first(self) -> bool:
        """Whether the chunk embeds the tokens."""
        return self.boundary.hop_in is None

    @property
    def is_last(self) -> bool:
        """Whether the chunk has the output head."""
        return self.boundary.hop_out is None

    def begin_step(self, samples: Sequence[Sequence[int]]) -> None:
        """The next micro-batch is the step's first.

        Args:
            samples: of each micro-batch, by their place in the data order; empty if the module
                shall not know.
        """
        self.boundary.begin_step()
        self._samples = iter(samples)

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Called by the schedules with what was received, before ``forward``."""
        # 1F1B hands over a list per received tensor shape, of which there is one.
        (self._input,) = input_tensor

    def forward(self, tokens: Tensor | None, labels: Tensor | None) -> Any:
        """The packed entries of the next hop; of the last chunk what the module returns."""
        entered = self.boundary.enter(self._input)
        self._input = None
        state = None if entered is None else self._state_type(*entered)
        result = self.module(tokens, state, labels, next(self._samples, None))
        return result if self.is_last else self.boundary.leave(*result[:3])
