"""A checkpoint's weights without its optimizer: what inference needs, in any layout."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_attnres.parallel.agreement import same_error_on_all_ranks
from megatron_attnres.parallel.groups import ParallelGroups
from megatron_attnres.parallel.parameters import sharding_of
from megatron_attnres.pipeline.chunk import PipelineChunk
from megatron_attnres.training.checkpoints.boxes import Slicing, boxes_of
from megatron_attnres.training.checkpoints.loading import named, verify_together
from megatron_attnres.training.checkpoints.plans import WEIGHTS, Piece, read_pieces
from megatron_attnres.training.checkpoints.safe_reader import SafeReader


def load_weights(
    folder: Path, given: str, chunks: Sequence[PipelineChunk], groups: ParallelGroups
) -> None:
    """Fill this rank's parameters, rounded to their data type. Collective.

    Args:
        folder: the checkpoint; its files are compared with their sums first.
        given: how the user named it.
        chunks: of this rank.
        groups: process groups.

    Raises:
        InputError: a file is damaged or cannot be read, or the checkpoint is of another model; the
            same on all ranks.
    """
    verify_together(folder, given)
    with same_error_on_all_ranks(), named(given), torch.no_grad():
        reader = SafeReader(folder)
        metadata = reader.read_metadata()
        for chunk in chunks:
            for name, parameter in chunk.module.named_parameters():
                # Checkpoints hold float32, whatever the model computes in.
                whole = torch.empty(parameter.numel(), dtype=torch.float32)
                name = f"{WEIGHTS}.{chunk.module.global_name(name)}"
                pieces = list(_pieces(name, whole, parameter, groups))
                read_pieces(reader, metadata, pieces)
                parameter.copy_(whole.view(parameter.shape))


def _pieces(name: str, flat: Tensor, parameter: Tensor, groups: ParallelGroups) -> Iterator[Piece]:
    """The boxes of the whole tensor that make up a rank's slice, as views of ``flat``."""
    slicing = Slicing(
        tuple(parameter.shape), sharding_of(parameter), groups.tensor_rank, groups.layout.tensor
    )
    for box in boxes_of(slicing, 0, flat.numel()):
        tensor = flat.as_strided(box.sizes, box.strides, box.start)
        yield Piece(name, slicing.whole_shape, box.offsets, tensor)
