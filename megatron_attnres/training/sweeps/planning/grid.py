"""A grid of runs, read from YAML. No torch.

flags:                what all runs share, keys of pretrain_attnres.py
sizes:                by name, keys of pretrain_attnres.py over the shared ones
shapes:               sizes solved for their ratios, see shapes.py
modes:                of baseline, block, full
num-blocks:           in block mode; one curve for each
tokens:               one of these three; compute with its unit, "3e13 FLOPs", "0.1 PFLOP/s-days"
tokens-per-parameter:
compute:
learning-rates:       the highest of each run
seeds:                1 if not given

The keys below shapes take a value or a list. A size may have them too; there they replace the
grid's.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from megatron_attnres.errors import InputError
from megatron_attnres.model.configuration import AttnResMode
from megatron_attnres.strict_yaml import read_strict_yaml
from megatron_attnres.training.sweeps.planning.budgets import BUDGET_KINDS, Budget, budgets_of
from megatron_attnres.training.sweeps.planning.curves import Curve
from megatron_attnres.training.sweeps.planning.grid_values import (
    check_keys,
    mapping,
    one_of,
    positive_number,
    values,
    whole_number,
)
from megatron_attnres.training.sweeps.planning.names import check_size_name
from megatron_attnres.training.sweeps.planning.run_flags import read_flags
from megatron_attnres.training.sweeps.planning.shapes import SHAPE_KEYS, read_shapes

MOST_BLOCKS = 10**6
# Of NumPy's generators, which shuffle the data.
LARGEST_SEED = 2**32 - 1
READERS = {
    "modes": one_of(get_args(AttnResMode)),
    "num-blocks": whole_number(1, MOST_BLOCKS),
    "learning-rates": positive_number,
    "seeds": whole_number(0, LARGEST_SEED),
}
AXES = (*READERS, *BUDGET_KINDS)
GRID_KEYS = ("flags", "sizes", "shapes", *AXES)
DEFAULT_SEEDS = (1,)

Axes = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Size:
    """One size of a grid and what is varied at it.

    Attributes:
        name: in the grid.
        place: in the file, for errors.
        flags: of pretrain_attnres.py, the shared ones included.
        curves: what is compared.
        budgets: of each run.
        learning_rates: the highest of each run.
        seeds: of weights and data order.
    """

    name: str
    place: str
    flags: Mapping[str, Any]
    curves: tuple[Curve, ...]
    budgets: tuple[Budget, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]


def read_grid(path: Path) -> list[Size]:
    """The sizes of a grid, in the file's order, those of shapes last.

    Raises:
        InputError: one line that names the file, the place in it and the way out.
    """
    grid = _content(path)
    check_keys(grid, GRID_KEYS, str(path))
    shared = read_flags(grid.get("flags", {}), f"{path}: flags")
    axes = _axes(grid, f"{path}: the grid")
    sizes = [*_sizes(grid, path, shared, axes), *_shapes(grid, path, shared, axes)]
    if not sizes:
        raise InputError(f"{path}: has no size; give sizes or shapes")
    if "num-blocks" in axes:
        modes = {curve.mode for size in sizes for curve in size.curves}
        _check_blocks_are_used(modes, str(path))
    return sizes


def _content(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"{path}: is no file; give one with a grid")
    content = read_strict_yaml(path, str(path))
    if not isinstance(content, dict):
        held = "nothing" if content is None else f"a {type(content).__name__}"
        raise InputError(f"{path}: holds {held}; give keys and values")
    return mapping(content, str(path))


def _sizes(
    grid: Mapping[str, Any], path: Path, shared: Mapping[str, Any], axes: Axes
) -> Iterator[Size]:
    for name, keys in mapping(grid.get("sizes", {}), f"{path}: sizes").items():
        place = f"{path}: sizes.{name}"
        check_size_name(name, f"{path}: sizes")
        own = mapping(keys, place)
        flags = read_flags({key: own[key] for key in own if key not in AXES}, place)
        yield _size(name, place, {**shared, **flags}, _axes_over(axes, own, place))


def _shapes(
    grid: Mapping[str, Any], path: Path, shared: Mapping[str, Any], axes: Axes
) -> Iterator[Size]:
    if "shapes" not in grid:
        return
    place = f"{path}: shapes"
    keys = mapping(grid["shapes"], place)
    check_keys(keys, (*SHAPE_KEYS, *AXES), place)
    over = _axes_over(axes, keys, place)
    for shape in read_shapes(keys, shared, place):
        yield _size(shape.name, f"{place}: {shape.name}", {**shared, **shape.flags}, over)


def _axes_over(axes: Axes, keys: Mapping[str, Any], place: str) -> Axes:
    """A size's axes over the grid's."""
    own = _axes(keys, place)
    whole = {**axes, **own}
    if "num-blocks" in own:
        _check_blocks_are_used(whole.get("modes", ()), place)
    return whole


def _check_blocks_are_used(modes: Collection[str], place: str) -> None:
    if "block" not in modes:
        raise InputError(f"{place}: has num-blocks, but no block among its modes; add it to modes")


def _axes(keys: Mapping[str, Any], place: str) -> Axes:
    """The axes that a grid or a size gives; budgets of any kind are one axis."""
    axes: dict[str, tuple[Any, ...]] = {
        name: values(keys[name], f"{place}.{name}", read)
        for name, read in READERS.items()
        if name in keys
    }
    budgets = budgets_of(keys, place)
    return axes | ({"budgets": budgets} if budgets else {})


def _size(name: str, place: str, flags: Mapping[str, Any], axes: Axes) -> Size:
    for needed, ways in (
        ("modes", "modes"),
        ("learning-rates", "learning-rates"),
        ("budgets", "tokens, tokens-per-parameter or compute"),
    ):
        if needed not in axes:
            raise InputError(f"{place}: has no {needed}; give {ways}, in it or in the grid")
    return Size(
        name,
        place,
        flags,
        _curves(axes, place),
        axes["budgets"],
        axes["learning-rates"],
        axes.get("seeds", DEFAULT_SEEDS),
    )


def _curves(axes: Axes, place: str) -> tuple[Curve, ...]:
    if "block" in axes["modes"] and "num-blocks" not in axes:
        raise InputError(f"{place}: has mode block and no num-blocks; give it")
    return tuple(
        Curve(mode, blocks)
        for mode in axes["modes"]
        for blocks in (axes["num-blocks"] if mode == "block" else (None,))
    )
