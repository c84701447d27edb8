"""Whether the ids in indexed files fit the vocabulary."""

from collections.abc import Sequence

import numpy as np

from megatron_attnres.data.indexed_files import IndexedFiles, check_prefix
from megatron_attnres.errors import InputError


def check_token_ids(
    prefixes: Sequence[str], vocab_size: int, rank: int = 0, world_size: int = 1
) -> None:
    """Raise InputError if a corpus holds a negative id or one of ``vocab_size`` or more.

    An id beyond the vocabulary has no row in the embedding. Every rank streams its share of each
    .bin file. With ``world_size`` above 1 this is collective over the default process group, and
    every rank raises the same error.
    """
    for prefix in prefixes:
        pair = check_prefix(prefix)
        limits = np.iinfo(pair.dtype)
        if limits.min >= 0 and limits.max < vocab_size:
            continue  # no id of this data type can be wrong
        smallest, largest = id_range(pair, rank, world_size)
        if world_size > 1:
            import torch.distributed

            ranges: list[tuple[int, int]] = [(0, 0)] * world_size
            torch.distributed.all_gather_object(ranges, (smallest, largest))
            smallest = min(share[0] for share in ranges)
            largest = max(share[1] for share in ranges)
        if smallest < 0 or largest >= vocab_size:
            wrong = largest if largest >= vocab_size else smallest
            raise InputError(
                f"--data-path {prefix}: {prefix}.bin holds the token id {wrong}; the vocabulary of "
                f"{vocab_size} allows 0 to {vocab_size - 1}; give the tokenizer that made the file"
            )


def id_range(pair: IndexedFiles, rank: int = 0, world_size: int = 1) -> tuple[int, int]:
    """Return the smallest and largest id of one rank's share; 0 and 0 if the share is empty."""
    start = pair.tokens * rank // world_size
    stop = pair.tokens * (rank + 1) // world_size
    smallest = largest = 0
    for chunk in pair.chunks(start, stop):
        smallest = min(smallest, int(chunk.min()))
        largest = max(largest, int(chunk.max()))
    return smallest, largest
