"""A small grid that plans as it stands, for tests that change single keys of it."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

GRID: dict[str, Any] = {
    "flags": {
        "seq-length": 16,
        "micro-batch-size": 2,
        "global-batch-size": 4,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": 60,
        "data-path": ["nowhere"],
    },
    "sizes": {
        "small": {
            "num-layers": 2,
            "hidden-size": 16,
            "ffn-hidden-size": 32,
            "num-attention-heads": 4,
        },
        "big": {
            "num-layers": 4,
            "hidden-size": 32,
            "ffn-hidden-size": 64,
            "num-attention-heads": 4,
        },
    },
    "modes": ["baseline", "block", "full"],
    "num-blocks": 2,
    "tokens": 6400,
    "learning-rates": [0.01],
    "seeds": [1],
}


def grid(**changed: Any) -> dict[str, Any]:
    """The grid with other keys over it; None takes a key away, _ stands for a dash."""
    whole = deepcopy(GRID) | {name.replace("_", "-"): value for name, value in changed.items()}
    return {name: value for name, value in whole.items() if value is not None}


def flags(**changed: Any) -> dict[str, Any]:
    """Its shared flags, with others over them."""
    return GRID["flags"] | {name.replace("_", "-"): value for name, value in changed.items()}


def sizes(**changed: Any) -> dict[str, Any]:
    """Its small size alone, with other keys over its own."""
    small = GRID["sizes"]["small"]
    return {"small": small | {name.replace("_", "-"): value for name, value in changed.items()}}


def written(folder: Path, content: dict[str, Any] | str) -> Path:
    """A file with a grid, or with any text."""
    path = folder / "grid.yaml"
    path.write_text(
        content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
    )
    return path
