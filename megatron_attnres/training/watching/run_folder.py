"""Where a run keeps what it writes: ``--run-dir``, which all nodes share. No torch.

RUN/metrics.jsonl            one object per iteration
RUN/tensorboard/             event files
RUN/checkpoints/             see training/checkpoints/folders.py
RUN/events.jsonl             starts, stops, alarms, failures; see events.py
RUN/ranks/rank_00003.json    what rank 3 does and when it said so last; see rank_record.py
RUN/ranks/rank_00003.stacks  its stack dumps
RUN/failures/ATTEMPT.txt     the report of a start that failed
"""

import errno
from dataclasses import dataclass
from pathlib import Path


def is_there(file: Path) -> bool:
    """Whether there is such a file.

    Raises:
        OSError: something else has its name; to read a pipe would never end.
    """
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, f"{file.name} is no file")
    return file.exists()


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @property
    def metrics(self) -> Path:
        """The metrics file."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's folder."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def events(self) -> Path:
        """The file of events."""
        return self.path / "events.jsonl"

    @property
    def ranks(self) -> Path:
        """The folder of the ranks' records and stacks."""
        return self.path / "ranks"

    @property
    def failures(self) -> Path:
        """The folder of failure reports."""
        return self.path / "failures"

    def record(self, rank: int) -> Path:
        """What a rank says of itself."""
        return self.ranks / f"rank_{rank:05d}.json"

    def stacks(self, rank: int) -> Path:
        """A rank's stack dumps."""
        return self.ranks / f"rank_{rank:05d}.stacks"

    def report(self, attempt: str) -> Path:
        """The report of a start that failed."""
        return self.failures / f"{attempt}.txt"

    def claim(self, attempt: str) -> Path:
        """Made by the rank that writes the report."""
        return self.failures / f"{attempt}.claim"

    def make(self) -> None:
        """Make the folders.

        Raises:
            OSError: the system refuses.
        """
        for folder in (self.ranks, self.failures):
            folder.mkdir(parents=True, exist_ok=True)
