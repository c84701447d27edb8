"""Values of a grid, each read or refused in one line that names its place. Pure, no torch."""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from megatron_attnres.errors import InputError

Value = TypeVar("Value")

# Beyond it, what is made of numbers is more than a float holds.
LARGEST_NUMBER = 1e30
# Whole numbers of thousands of digits are not turned into text.
BEYOND_PRINTING = 10**40


def mapping(value: Any, place: str) -> dict[str, Any]:
    """Text keys and their values.

    Raises:
        InputError: it is no mapping, or a key is no text.
    """
    if not isinstance(value, dict):
        raise InputError(f"{place}: is {value!r}; give keys and values")
    for key in value:
        if not isinstance(key, str):
            raise InputError(f"{place}: key {key!r} is no text; put it in quotes")
    return value


def check_keys(given: Iterable[str], allowed: Collection[str], place: str) -> None:
    """Refuse other keys.

    Raises:
        InputError: it names the first of them.
    """
    for key in given:
        if key not in allowed:
            raise InputError(f"{place}: unknown key {key!r}; allowed are {', '.join(allowed)}")


def values(value: Any, place: str, read: Callable[[Any, str], Value]) -> tuple[Value, ...]:
    """One value or a list of them.

    Args:
        value: as the file has it.
        place: for the error.
        read: reads or refuses one.

    Raises:
        InputError: an empty list, or from ``read``.
    """
    if value is None or value == []:
        raise InputError(f"{place}: is empty; give at least one value")
    return tuple(read(one, place) for one in (value if isinstance(value, list) else [value]))


def positive_number(value: Any, place: str) -> float:
    """A number above 0; text such as 3e8, which YAML takes for no number, is one.

    Raises:
        InputError: see above.
    """
    if isinstance(value, int) and abs(value) > BEYOND_PRINTING:
        raise InputError(f"{place}: is too large; give at most {LARGEST_NUMBER:g}")
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number <= LARGEST_NUMBER:
        raise InputError(
            f"{place}: {value!r} is not allowed; give a number above 0, at most {LARGEST_NUMBER:g}"
        )
    return number


def whole_number(smallest: int, largest: int) -> Callable[[Any, str], int]:
    """A reader of whole numbers from ``smallest`` to ``largest``."""

    def read(value: Any, place: str) -> int:
        if isinstance(value, int) and abs(value) > BEYOND_PRINTING:
            raise InputError(f"{place}: is too large; at most {largest:,} is allowed")
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise InputError(
                f"{place}: {value!r} is not allowed; give a whole number of at least {smallest}"
            )
        if value > largest:
            raise InputError(f"{place}: {value} is not allowed; at most {largest:,} is")
        return value

    return read


def one_of(allowed: Collection[str]) -> Callable[[Any, str], str]:
    """A reader of one of these words."""

    def read(value: Any, place: str) -> str:
        if value not in allowed:
            raise InputError(f"{place}: {value!r} is not allowed; give one of {', '.join(allowed)}")
        return value

    return read
