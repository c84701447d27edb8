"""Switches Python's search for cyclic garbage off for as long as it would find nothing."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """For work that makes millions of objects and no cycles: the search takes as long as the work.

    Imports of large libraries are such work, too.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
