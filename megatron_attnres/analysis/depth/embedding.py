"""Data inside a page: compact, and no text in it can end its element. No torch."""

import json
from base64 import b64encode
from typing import Any

import numpy as np

from megatron_attnres.analysis.depth.records import TokenWeights

# What a weight of 1 is as a whole number of 16 bits; the page divides by it.
FULL_WEIGHT = 65_535


def encode_weights(weights: TokenWeights) -> str:
    """All weights as little-endian uint16 in base64: reader by reader, [sources, tokens] each.

    They are rounded to the nearest multiple of 1 / ``FULL_WEIGHT``.
    """
    numbers = [np.rint(one.astype(np.float64) * FULL_WEIGHT) for one in weights.weights]
    flat = np.concatenate([one.astype("<u2").ravel() for one in numbers])
    return b64encode(flat.tobytes()).decode("ascii")


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element: ASCII, and without ``<``, ``>`` and ``&``."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
