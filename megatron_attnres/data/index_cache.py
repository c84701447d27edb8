"""The shuffled index on disk is read as numbers, never as a pickle.

Megatron-Core reads it by ``numpy.load(allow_pickle=True)``, which unpickles any file that is no
array, and a pickle may run code. The cache lies beside the corpus unless a flag places it
elsewhere, so that it comes with a corpus from anywhere. Megatron-Core itself writes arrays of
numbers, which need no pickle.
"""

from pathlib import Path
from typing import Any

import numpy
from megatron.core.datasets import blended_dataset, gpt_dataset
from numpy.lib.format import MAGIC_PREFIX

from megatron_attnres.errors import InputError


def refuse_pickled_indices() -> None:
    """Make Megatron-Core's datasets read arrays of numbers alone. Calling it again is harmless."""
    for module in (gpt_dataset, blended_dataset):
        module.numpy = _NumpyWithoutPickles()


def check_indices(folder: Path) -> None:
    """Refuse a cache with anything but arrays in it.

    Args:
        folder: of the cache.

    Raises:
        InputError: names a file that is none.
    """
    for path in sorted(folder.glob("*.npy")):
        with open(path, "rb") as file:
            start = file.read(len(MAGIC_PREFIX))
        # Shorter: a killed run was writing it, and Megatron-Core writes it anew.
        if not MAGIC_PREFIX.startswith(start):
            raise InputError(_no_array(path))


class _NumpyWithoutPickles:
    """Numpy, but for what its ``load`` takes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy, name)

    def load(self, file: str | Path, **options: Any) -> Any:
        """An array from a file.

        Raises:
            InputError: it holds none.
        """
        try:
            loaded = numpy.load(file, **options | {"allow_pickle": False})
        except (ValueError, EOFError):
            loaded = None
        # An archive of several arrays is no index either.
        if not isinstance(loaded, numpy.ndarray):
            raise InputError(_no_array(file))
        return loaded


def _no_array(file: str | Path) -> str:
    return f"--data-cache-path: {file} is no array of numbers; remove it, and it is made anew"
