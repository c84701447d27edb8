"""Working on a stretch of tokens at a time, so that no temporary is as large as all sources.

Within a tile the sources lie side by side in the data type of the statistics, [tokens, sources,
h], which makes batched matrix products of the sums over sources. On a CPU a tile stays in the
cache from one to the next.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

# On a CPU what the caches hold beside two more of the kind; elsewhere few launches count.
_BYTES = {"cpu": 4 << 20}
_BYTES_ELSEWHERE = 256 << 20


def token_tiles(tokens: int, bytes_per_token: int, device: torch.device) -> list[slice]:
    """Stretches that cover 0 .. tokens - 1 in order, each of a bounded number of bytes.

    There is at least one, if only an empty one.
    """
    size = max(1, _BYTES.get(device.type, _BYTES_ELSEWHERE) // bytes_per_token)
    return [slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size)]


def gather(
    rows: Sequence[Tensor],
    tile: slice,
    workspace: Tensor,
    scales: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """The tile of every tensor [tokens, h], side by side, and times its scale [tokens, 1] if any.

    Returns:
        [tile, tensors, h], the beginning of the workspace.
    """
    gathered = workspace[: tile.stop - tile.start]
    for index, row in enumerate(rows):
        place = gathered[:, index].copy_(row[tile])
        if scales is not None and scales[index] is not None:
            place.mul_(scales[index][tile])
    return gathered


def scatter(values: Tensor, rows: Sequence[Tensor], tile: slice) -> None:
    """The other way: write [tile, tensors, h] into the tile of every tensor [tokens, h]."""
    for row, value in zip(rows, values.unbind(1), strict=True):
        row[tile] = value


def widened(rows: Tensor, tile: slice, workspace: Tensor) -> Tensor:
    """The tile of [tokens, h] in the workspace's data type: a view, or a copy in the workspace."""
    narrow = rows[tile]
    if narrow.dtype == workspace.dtype:
        return narrow
    return workspace[: narrow.shape[0]].copy_(narrow)


@contextmanager
def written(rows: Tensor, tile: slice, workspace: Tensor) -> Iterator[Tensor]:
    """Where to write the tile of [tokens, h]: in place, or in the workspace, and then rounded."""
    target = rows[tile]
    if target.dtype == workspace.dtype:
        yield target
        return
    wide = workspace[: target.shape[0]]
    yield wide
    target.copy_(wide)


def as_rows(tensor: Tensor) -> Tensor:
    """[..., h] as [tokens, h]."""
    return tensor.reshape(-1, tensor.shape[-1])
