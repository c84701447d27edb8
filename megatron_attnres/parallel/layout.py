"""How many ranks do what. Plain data, no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions, in Megatron's rank order tp - dp - pp (tp fastest).

    Attributes:
        tensor: TP ranks that share every layer.
        pipeline: P stages.
        virtual_pipeline: V chunks per stage; 1 is plain 1F1B.
        data: DP replicas.
        layers_per_chunk: layers of each of the P x V chunks in model order; None for equal chunks.
            The first may have none (embedding only) and the last (head only).
        sequence_parallel: shard activations between tensor-parallel regions along the sequence.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    data: int = 1
    sequence_parallel: bool = False
    layers_per_chunk: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.tensor * self.pipeline * self.data

    @property
    def num_chunks(self) -> int:
        """C = P x V."""
        return self.pipeline * self.virtual_pipeline
