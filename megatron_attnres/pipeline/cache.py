"""What a rank keeps of a micro-batch between its virtual stages: sources and their gradients."""

from typing import NamedTuple

from torch import Tensor


class CacheKey(NamedTuple):
    """A source of a micro-batch."""

    microbatch: int
    source: int

    def __str__(self) -> str:
        return f"source {self.source} of micro-batch {self.microbatch}"


class BlockCache:
    """Sources that later virtual stages of this rank will read, and gradients that they left.

    A source enters once, with the chunk that received or produced it, and leaves with its last
    reader's forward. Gradients of cached reads are deposited by the readers' backward and collected
    by the chunk that brought the source, whose backward runs after theirs.
    """

    def __init__(self) -> None:
        self._sources: dict[CacheKey, Tensor] = {}
        self._statistics: dict[CacheKey, Tensor] = {}
        self._deposits: dict[CacheKey, Tensor] = {}
        self._put_by: dict[CacheKey, int] = {}
        self.peak_entries = 0

    def put(self, key: CacheKey, source: Tensor, chunk: int) -> None:
        """Keep a source that a chunk received or produced.

        Raises:
            RuntimeError: it is there already.
        """
        if key in self._sources:
            raise RuntimeError(f"{key} enters the cache a second time")
        self._sources[key] = source.detach()
        self._put_by[key] = chunk
        self.peak_entries = max(self.peak_entries, len(self._sources))

    def read(self, key: CacheKey, chunk: int, last: bool) -> Tensor:
        """The source; the last reader takes it out.

        Raises:
            RuntimeError: it is not there.
        """
        if key not in self._sources:
            raise RuntimeError(f"{key}, read by chunk {chunk}, is not in the cache")
        if last:
            self._statistics.pop(key, None)
        return self._sources.pop(key) if last else self._sources[key]

    def note(self, key: CacheKey, statistic: Tensor) -> None:
        """Keep what a chunk computed of a cached source, for later readers.

        Raises:
            RuntimeError: the source is not there.
        """
        if key not in self._sources:
            raise RuntimeError(f"{key} is not in the cache, what a chunk computed of it has no use")
        self._statistics[key] = statistic

    def noted(self, key: CacheKey) -> Tensor | None:
        """What an earlier chunk computed of a source that is still to be read; None if nothing."""
        return self._statistics.get(key)

    def deposit(self, key: CacheKey, gradient: Tensor) -> None:
        """Leave the gradient of a cached read."""
        earlier = self._deposits.get(key)
        self._deposits[key] = gradient if earlier is None else earlier + gradient

    def collect(self, key: CacheKey) -> Tensor | None:
        """Take the sum of what was left; None if nothing was."""
        return self._deposits.pop(key, None)

    def begin_step(self) -> None:
        """Forget the last step's bookkeeping."""
        self._put_by.clear()
        self.peak_entries = 0

    def check_empty(self) -> None:
        """Raise if anything is left at the end of a step.

        Raises:
            RuntimeError: names entry, micro-batch and chunk.
        """
        for left, what in ((self._sources, ""), (self._deposits, "the gradient of ")):
            for key in left:
                raise RuntimeError(
                    f"the step ended with {what}{key}, brought by chunk "
                    f"{self._put_by.get(key)}, still in the cache ({len(left)} left)"
                )
