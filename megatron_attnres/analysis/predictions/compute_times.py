"""How long chunks compute: layers' times given, from FLOPs, or measured. No torch."""

from dataclasses import dataclass

from megatron_attnres.model.configuration import ModelConfig
from megatron_attnres.model.flops import head_forward_flops, layer_forward_flops
from megatron_attnres.pipeline.schedule import Recompute
from megatron_attnres.pipeline.timeline.chunk_times import ChunkSeconds

BACKWARD_OVER_FORWARD = 2


@dataclass(frozen=True)
class LayerTimes:
    """Compute times of equal layers; seconds for one micro-batch on one rank.

    Attributes:
        forward, backward: of one layer with standard residuals.
        head_forward, head_backward: of the output head, which the last chunk has.
        depth_attention_share: what a layer's two reads from depth take, as a share of the layer.
    """

    forward: float
    backward: float
    head_forward: float = 0.0
    head_backward: float = 0.0
    depth_attention_share: float = 0.0

    def of_chunks(self, layers_per_chunk: tuple[int, ...], reads_depth: bool) -> ChunkSeconds:
        """Of every chunk, with or without Attention Residuals."""
        factor = 1 + self.depth_attention_share if reads_depth else 1
        forward = [layers * self.forward * factor for layers in layers_per_chunk]
        backward = [layers * self.backward * factor for layers in layers_per_chunk]
        forward[-1] += self.head_forward
        backward[-1] += self.head_backward
        return ChunkSeconds(tuple(forward), tuple(backward))


@dataclass(frozen=True)
class MeasuredTimes:
    """Compute times of the chunks of one layout, as measured.

    Attributes:
        seconds: of the chunks.
        reads_depth: whether the measured model had Attention Residuals.
        depth_attention_share: as of ``LayerTimes``; turns one kind of model into the other.
    """

    seconds: ChunkSeconds
    reads_depth: bool
    depth_attention_share: float = 0.0

    def of_chunks(self, layers_per_chunk: tuple[int, ...], reads_depth: bool) -> ChunkSeconds:
        """Of every chunk, with or without Attention Residuals; the layout is the measured one."""
        factor = (1 + self.depth_attention_share) ** (reads_depth - self.reads_depth)
        forward, backward = (tuple(one * factor for one in times) for times in self.seconds)
        return ChunkSeconds(forward, backward)


def times_from_flops(
    model: ModelConfig,
    samples: int,
    flops_per_second: float,
    recompute: Recompute,
    depth_attention_share: float,
) -> LayerTimes:
    """FLOPs over a rate.

    Backward is twice forward and what recomputation runs again; it never runs the head again.

    Args:
        model: sizes; a vocabulary of 0 has no head.
        samples: of one micro-batch.
        flops_per_second: of all ranks that share a layer.
        recompute: activations computed again in backward.
        depth_attention_share: see ``LayerTimes``.
    """
    layer = layer_forward_flops(model)
    again = {"none": 0, "selective": layer.core_attention, "full": layer.total}[recompute]
    seconds_per_flop = samples / flops_per_second
    head = head_forward_flops(model) * seconds_per_flop
    return LayerTimes(
        forward=layer.total * seconds_per_flop,
        backward=(BACKWARD_OVER_FORWARD * layer.total + again) * seconds_per_flop,
        head_forward=head,
        head_backward=BACKWARD_OVER_FORWARD * head,
        depth_attention_share=depth_attention_share,
    )
