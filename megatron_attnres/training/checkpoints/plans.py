"""Pieces of whole tensors, as torch.distributed.checkpoint writes and reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_attnres.errors import InputError

# The kind of tensor, before the parameter's name, that holds the weights.
WEIGHTS = "master"


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor.

    Attributes:
        name: of the whole tensor.
        whole_shape: of the whole tensor.
        offsets: of the box in it.
        tensor: the box; a view of where the numbers live.
    """

    name: str
    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Its place, as the library describes it."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


class PieceSavePlanner(DefaultSavePlanner):
    """Every rank writes its pieces. The global plan is refused unless they make whole tensors."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self._pieces = {(piece.name, piece.offsets): piece for piece in pieces}

    def create_local_plan(self) -> SavePlan:
        """See the base class."""
        return SavePlan([_write_item(piece) for piece in self._pieces.values()], planner_data={})

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """See the base class."""
        index = write_item.index
        return self._pieces[index.fqn, tuple(index.offset)].tensor.detach()


class PieceLoadPlanner(DefaultLoadPlanner):
    """Fills pieces in place, whatever boxes the files hold."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self._pieces = {(piece.name, piece.offsets): piece.tensor for piece in pieces}
        self._wanted: dict[str, list[Piece]] = {}
        for piece in pieces:
            self._wanted.setdefault(piece.name, []).append(piece)

    def create_local_plan(self) -> LoadPlan:
        """See the base class.

        Raises:
            InputError: a tensor is missing or of another shape; names it.
        """
        items = []
        for name, pieces in self._wanted.items():
            saved = self.metadata.state_dict_metadata.get(name)
            _check_tensor(name, saved, pieces[0].whole_shape)
            items += create_read_items_for_chunk_list(name, saved, [one.chunk for one in pieces])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """See the base class."""
        return self._pieces[index.fqn, tuple(index.offset)].detach()


def read_pieces(reader: StorageReader, metadata: Metadata, pieces: Sequence[Piece]) -> None:
    """Fill pieces in place, without collectives, from wherever their numbers lie.

    Raises:
        InputError: see ``PieceLoadPlanner``.
    """
    planner = PieceLoadPlanner(pieces)
    planner.set_up_planner({}, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()


def _write_item(piece: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(piece.name, torch.Size(piece.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=piece.chunk,
            properties=TensorProperties(dtype=piece.tensor.dtype),
            size=torch.Size(piece.whole_shape),
        ),
    )


def _check_tensor(name: str, saved: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(saved, TensorStorageMetadata):
        raise InputError(f"{name} is missing in the checkpoint")
    if tuple(saved.size) != shape:
        raise InputError(f"{name} is {tuple(saved.size)} in the checkpoint, {shape} in the model")
