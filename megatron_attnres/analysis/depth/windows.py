"""A text as the contexts that a model reads it in. No torch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

NO_LABEL = -1


@dataclass(frozen=True)
class Window:
    """Tokens that a model reads together.

    Attributes:
        tokens: ids, int64 [s].
        labels: the token that follows each, int64 [s]; ``NO_LABEL`` where the text ends.
    """

    tokens: np.ndarray
    labels: np.ndarray


def windows_of(ids: Sequence[int] | np.ndarray, context: int) -> list[Window]:
    """Cut a text into windows of ``context`` tokens that follow each other; the last may be short.

    Every token is read once, and every token but the first is predicted once.
    """
    tokens = np.asarray(ids, dtype=np.int64)
    labels = np.append(tokens[1:], NO_LABEL)
    return [
        Window(tokens[start : start + context], labels[start : start + context])
        for start in range(0, len(tokens), context)
    ]


def batches_of(windows: Iterable[Window], batch_size: int) -> Iterator[list[Window]]:
    """At most ``batch_size`` windows at a time, in order, of one length each time."""
    batch: list[Window] = []
    for window in windows:
        if batch and (len(batch) == batch_size or len(batch[0].tokens) != len(window.tokens)):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch
