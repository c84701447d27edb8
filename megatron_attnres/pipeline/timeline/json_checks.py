"""Values out of a JSON file, each checked; what is wrong is said with its place in the file.

``where`` is always that place, such as ``steps[0].computes[3]``.
"""

import json
from collections.abc import Sequence
from typing import Any

SHOWN_CHARACTERS = 40
# Whole numbers and seconds beyond these are no sizes and no times.
MOST_WHOLE, MOST_SECONDS = 2**53, 1e12


class WrongContent(ValueError):
    """What is wrong and where, in one line that does not name the file."""


def read_field(content: Any, where: str, name: str) -> Any:
    """The field of an object; ``where`` is empty for the file itself.

    Raises:
        WrongContent: no object, or one without the field.
    """
    if not isinstance(content, dict):
        raise WrongContent(f"{where or 'content'} is {_shown(content)}, not an object of fields")
    if name not in content:
        raise WrongContent(f"{f'{where}.{name}' if where else name} is missing")
    return content[name]


def read_list(value: Any, where: str) -> list[Any]:
    """A list.

    Raises:
        WrongContent: no list.
    """
    if not isinstance(value, list):
        raise WrongContent(f"{where} is {_shown(value)}, not a list")
    return value


def read_row(value: Any, where: str, columns: int) -> list[Any]:
    """A list of as many values as there are columns.

    Raises:
        WrongContent: no list, or one of another length.
    """
    row = read_list(value, where)
    if len(row) != columns:
        raise WrongContent(f"{where} has {len(row)} values, not {columns}")
    return row


def read_whole(value: Any, where: str, smallest: int, largest: int = MOST_WHOLE) -> int:
    """A whole number.

    Raises:
        WrongContent: no whole number, or one below ``smallest`` or above ``largest``.
    """
    # Not isinstance: true is an int.
    if type(value) is not int or value < smallest:
        raise WrongContent(f"{where} is {_shown(value)}, not a whole number of at least {smallest}")
    if value > largest:
        raise WrongContent(f"{where} is {_shown(value)}; at most {largest} is allowed")
    return value


def read_index(value: Any, where: str, count: int) -> int:
    """An index of one of ``count`` things.

    Raises:
        WrongContent: no index of them.
    """
    if type(value) is not int or not 0 <= value < count:
        allowed = f"allowed are 0 to {count - 1}" if count > 0 else "there is none"
        raise WrongContent(f"{where} is {_shown(value)}; {allowed}")
    return value


def read_choice(value: Any, where: str, allowed: Sequence[Any]) -> Any:
    """One of the allowed values.

    Raises:
        WrongContent: none of them.
    """
    # Types count, because 1 == true.
    if not any(type(value) is type(one) and value == one for one in allowed):
        choices = ", ".join(map(json.dumps, allowed))
        raise WrongContent(f"{where} is {_shown(value)}; allowed: {choices}")
    return value


def read_seconds(value: Any, where: str) -> float:
    """A time.

    Raises:
        WrongContent: no number, or one beyond all times.
    """
    if type(value) in (int, float) and abs(value) <= MOST_SECONDS:
        return float(value)
    raise WrongContent(f"{where} is {_shown(value)}, not a finite number of seconds")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
