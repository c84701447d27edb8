"""YAML mappings whose keys are given once. No torch."""

from pathlib import Path
from typing import Any

import yaml

from megatron_attnres.errors import InputError


class _DuplicateKeyError(yaml.YAMLError):
    """A key that YAML would silently take from its last place."""


class _StrictLoader(yaml.SafeLoader):
    """Refuses what ``SafeLoader`` lets pass."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build the mapping if no key is there twice."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise _DuplicateKeyError(
                        f"line {line}: key {key.value!r} is given twice; give it once"
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_strict_yaml(path: Path) -> dict[Any, Any]:
    """The mapping that a file holds.

    Raises:
        InputError: a file that cannot be read, is no YAML, gives a key twice or holds no mapping.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"{path}: is no file; give one with a grid")
    try:
        loader = _StrictLoader(path.read_text(encoding="utf-8"))
        try:
            content = loader.get_single_data()
        finally:
            loader.dispose()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give a readable file") from None
    except _DuplicateKeyError as error:
        raise InputError(f"{path}: {error}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        # ValueError: bytes that are no text, or a date. RecursionError: thousands of brackets.
        # LookupError, AttributeError: a tag as !!bool with a value that it does not fit.
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        held = "nothing" if content is None else f"a {type(content).__name__}"
        raise InputError(f"{path}: holds {held}; give keys and values")
    return content
