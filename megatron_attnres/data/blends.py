"""``--data-path`` and ``--split``: which corpora, in which shares, for what."""

import math
import re
from dataclasses import dataclass

from megatron_attnres.errors import InputError

SPLITS = ("training", "validation", "test")
"""The order of the shares in ``--split``."""


@dataclass(frozen=True)
class Blend:
    """Corpora to draw samples from.

    Attributes:
        prefixes: of .bin / .idx pairs.
        weights: one positive number a prefix; None where the corpora's sizes decide.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(data_path: tuple[str, ...]) -> Blend:
    """Read Megatron's ``--data-path``: prefixes alone, or a weight before every prefix.

    Raises:
        InputError: nothing given, weights before some prefixes only, or a weight not positive.
    """
    if not data_path:
        raise InputError("--data-path: empty; at least one .bin / .idx prefix is needed")
    text = " ".join(data_path)
    weights = [_number(word) for word in data_path[0::2]]
    if all(weight is None for weight in map(_number, data_path)):
        return Blend(tuple(data_path), None)
    if len(data_path) % 2 or None in weights:
        raise InputError(
            f"--data-path {text}: allowed are prefixes alone, or a weight before every prefix"
        )
    if not all(weight and weight > 0 and math.isfinite(weight) for weight in weights):
        raise InputError(f"--data-path {text}: weights must be positive numbers")
    return Blend(tuple(data_path[1::2]), tuple(weight for weight in weights if weight))


def parse_split(split: str) -> tuple[float, float, float]:
    """Read ``--split``: shares of training, validation and test data, which add up to 1.

    Raises:
        InputError: not one to three non-negative numbers with commas between, or all zero.
    """
    words = split.split(",")
    # Digits only: Megatron-Core, which reads the same text, would take 9e2 for the shares 9 and 2.
    numbers = [float(word) for word in words if re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", word)]
    total = sum(numbers)
    if len(numbers) != len(words) or len(words) > len(SPLITS) or not 0 < total < math.inf:
        raise InputError(
            f"--split {split}: allowed are up to three non-negative shares of {', '.join(SPLITS)}, "
            "with commas between and not all zero, such as 969,30,1"
        )
    training, validation, test = [*numbers, 0.0, 0.0][: len(SPLITS)]
    return training / total, validation / total, test / total


def split_bounds(split: str, sequences: int) -> tuple[tuple[int, int], ...]:
    """Return the first and one past the last sequence of each split, rounded as Megatron-Core does.

    Args:
        split: as given to ``--split``.
        sequences: number of sequences of one corpus.
    """
    bounds = []
    start = 0.0
    for share in parse_split(split):
        end = start + share
        bounds.append((round(start * sequences), round(end * sequences)))
        start = end
    return tuple(bounds)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
