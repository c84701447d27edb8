"""Where two checkpoints differ, whatever layouts wrote them: memory is that of two tensors."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_attnres.training.checkpoints.description import Description
from megatron_attnres.training.checkpoints.inspection import data_of, layout_of
from megatron_attnres.training.checkpoints.stored_checkpoint import StoredCheckpoint

_LAYOUT = "layout"
# Numbers that are compared at once: few enough that double-precision copies of them are small.
_SLICE = 1 << 22


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
