"""Runs that the user leaves out of a fit, by name. Pure."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from megatron_attnres.errors import InputError

Item = TypeVar("Item")


def split_excluded(
    items: Sequence[Item], names_of: Callable[[Item], Sequence[str]], patterns: Sequence[str]
) -> tuple[list[Item], list[Item]]:
    """What stays and what is left out.

    Args:
        items: runs.
        names_of: the names that a pattern may match.
        patterns: as a shell's, with * and ?.

    Raises:
        InputError: a pattern that matches nothing.
    """
    for pattern in patterns:
        if not any(_matches(names_of(item), [pattern]) for item in items):
            raise InputError(
                f"--exclude {pattern}: matches no run; give names such as "
                f"{names_of(items[0])[0]!r}, with * and ?"
                if items
                else f"--exclude {pattern}: there are no runs to leave out"
            )
    is_out = [_matches(names_of(item), patterns) for item in items]
    kept = [item for item, out in zip(items, is_out, strict=True) if not out]
    return kept, [item for item, out in zip(items, is_out, strict=True) if out]


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
