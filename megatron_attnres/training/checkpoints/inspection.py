"""What a checkpoint holds, and where two of them differ. One process; no ranks, no model.

Tensors are read whole and one at a time, whatever boxes the files hold, so memory is that of the
largest tensor (of two, to compare) and never that of a model.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_attnres.training.checkpoints.description import DESCRIPTION, Description
from megatron_attnres.training.checkpoints.folders import METADATA, digests_in, verify
from megatron_attnres.training.checkpoints.plans import WEIGHTS, Piece, read_pieces
from megatron_attnres.training.checkpoints.safe_reader import SafeReader, named_if_unreadable

# Every parameter of depth attention belongs to a module whose name ends so, and no other does.
_DEPTH_ATTENTION = "reader."
_LAYOUT = "layout"
# Numbers that are compared at once: few enough that double-precision copies of them are small.
_SLICE = 1 << 22


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


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters, a tied embedding counted once.

    Attributes:
        total: of the model.
        weight_decayed: matrices, depth attention's excluded.
        not_decayed: vectors, and all of depth attention.
        depth_attention: those among them that are depth attention's.
    """

    total: int
    weight_decayed: int
    not_decayed: int
    depth_attention: int


@dataclass(frozen=True)
class Summary:
    """A checkpoint in short.

    Attributes:
        folder: where it lies.
        iteration, consumed_samples, tokens, skipped_steps, optimizer_steps: where its run stood.
        layout: of the run that wrote it, with ZeRO stage and precision, by name; None for what its
            description does not say.
        plan_digest: of that run's pipeline plan.
        model, data: what must match to load it, flat, by name; the digest of samples included.
        files: all of the folder's.
        total_bytes: of the files.
        parameters: counts by group.
        bytes_by_kind: of the tensors' numbers.
        tensors: every whole tensor.
    """

    folder: str
    iteration: int
    consumed_samples: int
    tokens: int
    skipped_steps: int
    optimizer_steps: int
    layout: dict[str, Any]
    plan_digest: str
    model: dict[str, Any]
    data: dict[str, Any]
    files: list[StoredFile]
    total_bytes: int
    parameters: ParameterCounts
    bytes_by_kind: dict[str, int]
    tensors: list[StoredTensor]


@dataclass(frozen=True)
class ValueDifference:
    """A field of the descriptions, or the shape of a tensor, that is not the same in both."""

    name: str
    one: Any
    other: Any


@dataclass(frozen=True)
class NumberDifference:
    """A tensor of one shape whose bits differ.

    Attributes:
        name: of the tensor.
        largest: absolute difference of two elements.
        relative_norm: Euclidean norm of the difference over the larger of the two tensors' norms:
            2 at most, and the same from either side. Both are None where a NaN or an infinity is
            among the numbers, which no difference measures.
    """

    name: str
    largest: float | None
    relative_norm: float | None


@dataclass(frozen=True)
class Comparison:
    """Where two checkpoints differ.

    Attributes:
        one, other: their folders.
        fields: of state, model, data and layout.
        only_in_one, only_in_other: names of tensors.
        of_other_shape: tensors in both.
        bit_equal: number of tensors in both that are the same to the last bit.
        different: the others of one shape, the worst first.
    """

    one: str
    other: str
    fields: list[ValueDifference]
    only_in_one: list[str]
    only_in_other: list[str]
    of_other_shape: list[ValueDifference]
    bit_equal: int
    different: list[NumberDifference]

    @property
    def equal(self) -> bool:
        """Whether a run would go on alike from both: their layouts may differ, all else not."""
        return not (
            any(not field.name.startswith(f"{_LAYOUT}.") for field in self.fields)
            or self.only_in_one
            or self.only_in_other
            or self.of_other_shape
            or self.different
        )


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


def summarise(checkpoint: StoredCheckpoint) -> Summary:
    """A checkpoint in short; reads no tensor.

    Raises:
        InputError: its folder cannot be listed.
    """
    description, files = checkpoint.description, checkpoint.files()
    tensors = list(checkpoint.tensors.values())
    return Summary(
        folder=str(checkpoint.folder),
        **asdict(description.state),
        optimizer_steps=description.optimizer_steps,
        layout=layout_of(description),
        plan_digest=description.plan_digest,
        model=description.model,
        data=data_of(description),
        files=files,
        total_bytes=sum(file.bytes for file in files),
        parameters=count_parameters(tensors),
        bytes_by_kind=bytes_by_kind(tensors),
        tensors=tensors,
    )


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


def count_parameters(tensors: Iterable[StoredTensor]) -> ParameterCounts:
    """By the rule of ``takes_weight_decay``, from names and shapes alone."""
    total = decayed = depth = 0
    for tensor in tensors:
        if tensor.kind != WEIGHTS:
            continue
        total += tensor.numbers
        if _DEPTH_ATTENTION in tensor.name:
            depth += tensor.numbers
        elif len(tensor.shape) > 1:
            decayed += tensor.numbers
    return ParameterCounts(total, decayed, total - decayed, depth)


def bytes_by_kind(tensors: Iterable[StoredTensor]) -> dict[str, int]:
    """Bytes of master weights and of each moment."""
    found: Counter[str] = Counter()
    for tensor in tensors:
        found[tensor.kind] += tensor.bytes
    return dict(found)


def layout_of(description: Description) -> dict[str, Any]:
    """How the run that wrote a checkpoint was laid out; None for what it does not say."""
    layout = description.configuration.get("layout", {})
    optimizer = description.configuration.get("optimizer", {})
    sizes = ("tensor", "pipeline", "virtual_pipeline", "data")
    return {
        **{name: layout.get(name) for name in sizes},
        "zero_stage": optimizer.get("zero_stage"),
        "precision": optimizer.get("precision"),
        "sequence_parallel": layout.get("sequence_parallel"),
        "layers_per_chunk": layout.get("layers_per_chunk"),
    }


def data_of(description: Description) -> dict[str, Any]:
    """What decided on the order of samples, and the digest of that order."""
    return description.data | {"order": description.order}


def compare(one: StoredCheckpoint, other: StoredCheckpoint) -> Comparison:
    """Every difference between two checkpoints, whatever layouts wrote them.

    Raises:
        InputError: a tensor that is in both cannot be read.
    """
    shared = one.tensors.keys() & other.tensors.keys()
    shapes = [
        ValueDifference(name, one.tensors[name].shape, other.tensors[name].shape)
        for name in sorted(shared)
    ]
    of_other_shape = [pair for pair in shapes if pair.one != pair.other]
    of_one_shape = [pair.name for pair in shapes if pair.one == pair.other]
    found = [_difference(name, one.read(name), other.read(name)) for name in of_one_shape]
    different = [difference for difference in found if difference is not None]
    return Comparison(
        one=str(one.folder),
        other=str(other.folder),
        fields=differing_fields(one.description, other.description),
        only_in_one=sorted(one.tensors.keys() - shared),
        only_in_other=sorted(other.tensors.keys() - shared),
        of_other_shape=of_other_shape,
        bit_equal=len(of_one_shape) - len(different),
        different=sorted(different, key=_badness, reverse=True),
    )


def differing_fields(one: Description, other: Description) -> list[ValueDifference]:
    """Fields of state, model, data and layout, named ``state.iteration`` and so on.

    The learning-rate schedule is left out: but for its position, which is the iteration, the run
    that loads a checkpoint brings its own.
    """
    first, second = _fields(one), _fields(other)
    return [
        ValueDifference(name, first.get(name), second.get(name))
        for name in (first | second)
        if first.get(name) != second.get(name)
    ]


def difference_of(one: Tensor, other: Tensor) -> tuple[float | None, float | None]:
    """Largest absolute difference and relative norm; see ``NumberDifference``."""
    largest, squares = 0.0, [0.0, 0.0, 0.0]
    for part, counterpart in _slices(one, other):
        first, second = part.double(), counterpart.double()
        difference = first - second
        largest = max(largest, difference.abs().max().item())
        for index, values in enumerate((difference, first, second)):
            squares[index] += values.square().sum().item()
    if not all(map(math.isfinite, squares)):
        return None, None
    norm = math.sqrt(max(squares[1:]))
    return largest, math.sqrt(squares[0]) / norm if norm else 0.0


def bits_equal(one: Tensor, other: Tensor) -> bool:
    """Unlike ``torch.equal``: a NaN is its own copy's equal, and 0 is not -0."""
    return one.dtype == other.dtype and all(
        torch.equal(part.view(torch.uint8), counterpart.view(torch.uint8))
        for part, counterpart in _slices(one, other)
    )


def _difference(name: str, one: Tensor, other: Tensor) -> NumberDifference | None:
    return None if bits_equal(one, other) else NumberDifference(name, *difference_of(one, other))


def _badness(difference: NumberDifference) -> float:
    return math.inf if difference.relative_norm is None else difference.relative_norm


def _slices(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors of one shape, some of their elements at a time, flat; nothing for empty ones."""
    for start in range(0, one.numel(), _SLICE):
        yield one.flatten()[start : start + _SLICE], other.flatten()[start : start + _SLICE]


def _fields(description: Description) -> dict[str, Any]:
    state = asdict(description.state) | {"optimizer_steps": description.optimizer_steps}
    layout = layout_of(description) | {"plan_digest": description.plan_digest}
    parts = {
        "state": state,
        "model": description.model,
        "data": data_of(description),
        _LAYOUT: layout,
    }
    return {
        f"{kind}.{name}": value for kind, fields in parts.items() for name, value in fields.items()
    }
