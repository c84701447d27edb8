"""What ranks must agree on: their errors, and the plan by which they send and receive."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def check_same_on_all_ranks(description: dict[str, Any]) -> None:
    """Refuse to start a job whose ranks would send and receive by different plans. Collective.

    Called before any group is made: a difference would show as a hang or a wrong shape later.

    Args:
        description: by name; the same names on all ranks.

    Raises:
        InputError: names two ranks, the field that differs and both values; the same on all ranks.
    """
    everyone: list[dict[str, Any]] = [{}] * distributed.get_world_size()
    distributed.all_gather_object(everyone, description)
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other.get(name) != value:
                raise InputError(
                    f"rank 0 has {name} {value}, rank {rank} has {other.get(name)}; start all "
                    "ranks with the same flags"
                )
