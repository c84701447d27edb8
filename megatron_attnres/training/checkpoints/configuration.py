"""How a run is saved. Plain data, no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SaveConfig:
    """Where and how to save.

    Attributes:
        folder: of all checkpoints of the run.
        asynchronous: write in a thread; where memory for a copy lacks, the loop waits instead.
        retries: failed saves in a row that the run survives.
        keep_last: newest checkpoints to keep; None keeps all.
        keep_every: of the older ones those of every so many iterations stay as well.
    """

    folder: str
    asynchronous: bool = True
    retries: int = 2
    keep_last: int | None = None
    keep_every: int | None = None
