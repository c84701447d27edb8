"""YAML files that mean what they look like. No torch."""

import re
from pathlib import Path
from typing import Any

import yaml

from megatron_attnres.errors import InputError

# Whole numbers as people write them. YAML knows others: 012 is 10, 1:30 is 90.
DECIMAL = re.compile(r"[+-]?(0|[1-9][0-9_]*)")


class _MisleadingError(yaml.YAMLError):
    """What YAML would silently take for something else than it looks like."""


class _StrictLoader(yaml.SafeLoader):
    """Refuses what ``SafeLoader`` lets pass."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build the mapping if no key is there twice."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise _MisleadingError(
                        f"line {line}: key {key.value!r} is given twice; give it once"
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        """Build a whole number if it is written in decimal digits."""
        if not DECIMAL.fullmatch(node.value):
            raise _misleading_number(node)
        return self.construct_yaml_int(node)

    def construct_point_number(self, node: yaml.ScalarNode) -> float:
        """Build a number with a point if it has no colons."""
        if ":" in node.value:
            raise _misleading_number(node)
        return self.construct_yaml_float(node)


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_decimal)
_StrictLoader.add_constructor("tag:yaml.org,2002:float", _StrictLoader.construct_point_number)


def read_strict_yaml(path: Path, name: str) -> Any:
    """What a file holds; None if nothing.

    Args:
        path: of the file.
        name: the same for the error, with the flag that gave it.

    Raises:
        InputError: a file that cannot be read, is no YAML, gives a key twice or has a number that
            YAML takes for another one than people do.
    """
    try:
        loader = _StrictLoader(path.read_text(encoding="utf-8"))
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}; give a readable file") from None
    except _MisleadingError as error:
        raise InputError(f"{name}: {error}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # ValueError: bytes that are no text, or a date. RecursionError: thousands of brackets.
        # LookupError, AttributeError: a tag as !!bool with a value that it does not fit.
        raise InputError(f"{name}: not YAML: {' '.join(str(error).split())}") from None


def _misleading_number(node: yaml.ScalarNode) -> _MisleadingError:
    return _MisleadingError(
        f"line {node.start_mark.line + 1}: {node.value[:40]} is a number in YAML that is not "
        "decimal; write it in decimal digits, or put it in quotes"
    )
