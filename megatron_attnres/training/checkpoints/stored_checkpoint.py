"""A checkpoint that is open for reading. One process; no ranks, no model.

Tensors are read whole and one at a time, whatever boxes the files hold, so memory is that of the
largest tensor and never that of a model.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_attnres.training.checkpoints.description import DESCRIPTION, Description
from megatron_attnres.training.checkpoints.folders import METADATA, digests_in, verify
from megatron_attnres.training.checkpoints.plans import Piece, read_pieces
from megatron_attnres.training.checkpoints.safe_reader import SafeReader, named_if_unreadable


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor as the files hold it.

    Attributes:
        name: kind and global name of the parameter, ``exp_avg.NAME``.
        shape: of the whole tensor.
        dtype: name of torch's data type.
        boxes: pieces it was written in.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: int

    @property
    def kind(self) -> str:
        """``master``, ``exp_avg`` or ``exp_avg_sq``."""
        return self.name.partition(".")[0]

    @property
    def numbers(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the elements alone; files add headers."""
        return self.numbers * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint and its size in bytes."""

    name: str
    bytes: int


class StoredCheckpoint:
    """A checkpoint that is open for reading.

    Args:
        folder: of one checkpoint.

    Attributes:
        folder: the same.
        description: what it says of itself.
        tensors: every whole tensor by name, in the order of names.

    Raises:
        InputError: it is not whole enough to say what it holds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with named_if_unreadable(folder):
            self._digests = digests_in(folder)
            # Before they are read: what is damaged may still look like something.
            verify(folder, (METADATA, DESCRIPTION), self._digests)
            self.description = Description.read(folder)
            self._reader = SafeReader(folder)
            self._metadata = self._reader.read_metadata()
            self.tensors = {tensor.name: tensor for tensor in tensors_of(self._metadata)}

    def verify(self) -> None:
        """Compare every file with the sum that was written with it.

        Raises:
            InputError: names the first that is missing or differs.
        """
        with named_if_unreadable(self.folder):
            verify(self.folder, sorted(self._digests), self._digests)

    def files(self) -> list[StoredFile]:
        """Every file, sums included, in the order of names.

        Raises:
            InputError: the folder cannot be listed.
        """
        with named_if_unreadable(self.folder):
            paths = sorted(path for path in self.folder.iterdir() if path.is_file())
            return [StoredFile(path.name, path.stat().st_size) for path in paths]

    def read(self, name: str) -> Tensor:
        """A whole tensor.

        Raises:
            InputError: a file it needs cannot be read.
        """
        stored = self.tensors[name]
        whole = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        piece = Piece(name, stored.shape, (0,) * whole.ndim, whole)
        with named_if_unreadable(self.folder, name):
            read_pieces(self._reader, self._metadata, [piece])
        return whole


def tensors_of(metadata: Metadata) -> list[StoredTensor]:
    """The whole tensors that the library's metadata lists, in the order of names."""
    return [
        StoredTensor(
            name,
            tuple(stored.size),
            str(stored.properties.dtype).removeprefix("torch."),
            len(stored.chunks),
        )
        for name, stored in sorted(metadata.state_dict_metadata.items())
        if isinstance(stored, TensorStorageMetadata)
    ]
