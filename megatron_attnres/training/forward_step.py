"""What one chunk does with one micro-batch, in the form that Megatron-Core's schedules call."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from megatron_attnres.pipeline.chunk import PipelineChunk

Batch = dict[str, Tensor]


def forward_step(
    data_iterator: Iterator[Batch], chunk: PipelineChunk
) -> tuple[Any, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    """Run a chunk; only the first and the last one read data (tokens and labels, [b, s])."""
    batch = next(data_iterator) if chunk.is_first or chunk.is_last else {}
    output = chunk(batch.get("tokens"), batch.get("labels"))
    return output, partial(mean_loss, batch.get("loss_mask"))


def mean_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro-batch's mean over tokens whose mask is 1.

    Args:
        loss_mask: [b, s].
        losses: [b, s], in nats.

    Returns:
        The scalar that backward starts from, and a copy for the metrics: the schedule scales the
        first in place.
    """
    mask = loss_mask.to(losses.dtype)
    loss = (losses * mask).sum() / mask.sum().clamp(min=1)
    return loss, {"lm_loss": loss.detach().clone()}
