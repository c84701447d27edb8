"""Where a stretch of one rank's slice of a parameter lies in the whole parameter.

ZeRO cuts flattened parameters anywhere and tensor parallelism cuts them along a dimension. Files
know whole parameters only, in boxes: a stretch of a matrix is part of a row, whole rows, part of a
row, and the rows belong to a place in the whole matrix. Pure arithmetic.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_attnres.parallel.parameters import Sharding


@dataclass(frozen=True)
class Slicing:
    """Which slice of a whole parameter a rank holds.

    Attributes:
        shape: of the slice.
        sharding: how tensor parallelism slices the parameter; None if the slice is all of it.
        rank, size: tensor-parallel rank and number of ranks.
    """

    shape: tuple[int, ...]
    sharding: Sharding | None
    rank: int
    size: int

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        if self.sharding is None:
            return self.shape
        return tuple(self.sharding.full_shape(self.shape, self.size))


@dataclass(frozen=True)
class Box:
    """A box of the whole parameter, and where its numbers lie in the stretch.

    Attributes:
        offsets: of its first element in the whole parameter.
        sizes: in every dimension.
        start: of its first element in the flattened stretch, whose elements follow row by row.
        strides: in the stretch, in elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


def boxes_of(slicing: Slicing, start: int, stop: int) -> list[Box]:
    """The boxes that make up elements start .. stop - 1 of the flattened slice."""
    found = []
    for offsets, sizes, place in _rectangles(slicing.shape, start, stop):
        box = Box(offsets, sizes, place - start, _strides(sizes))
        found += _placed(box, slicing)
    return found


def _rectangles(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Offsets, sizes and first element of the boxes of a flattened row-major array's stretch."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,), start
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # all inside one row
        yield from _of_row(shape, start // row, start, stop)
        return
    yield from _of_row(shape, first - 1, start, first * row)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield (first, *zeros), (last - first, *shape[1:]), first * row
    yield from _of_row(shape, last, last * row, stop)


def _of_row(
    shape: Sequence[int], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    base = index * math.prod(shape[1:])
    for offsets, sizes, place in _rectangles(shape[1:], start - base, stop - base):
        yield (index, *offsets), (1, *sizes), base + place


def _placed(box: Box, slicing: Slicing) -> Iterator[Box]:
    """A box of the slice as boxes of the whole: one for each of the matrices that it touches."""
    sharding = slicing.sharding
    if sharding is None:
        yield box
        return
    dim = sharding.dim
    length = slicing.shape[dim] // sharding.stride
    at, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
    while at < end:
        matrix, within = divmod(at, length)
        size = min(end - at, length - within)
        whole = matrix * length * slicing.size + slicing.rank * length + within
        yield Box(
            _with(box.offsets, dim, whole),
            _with(box.sizes, dim, size),
            box.start + (at - box.offsets[dim]) * box.strides[dim],
            box.strides,
        )
        at += size


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
