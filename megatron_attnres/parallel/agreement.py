"""Errors that one rank finds become every rank's error, so that none is left waiting."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed

from megatron_attnres.errors import InputError


@contextmanager
def same_error_on_all_ranks() -> Iterator[None]:
    """Raise on every rank the first rank's InputError, if any. Collective over all ranks.

    The body must not communicate: a rank that fails leaves it early.

    Raises:
        InputError: some rank raised it.
    """
    message = None
    try:
        yield
    except InputError as error:
        message = str(error)
    messages: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(messages, message)
    for found in messages:
        if found is not None:
            raise InputError(found)
