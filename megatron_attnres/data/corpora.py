"""A corpus: the documents of files, folders and saved datasets, in a fixed order, streamed."""

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from megatron_attnres.data.readers import (
    ALLOWED_NAMES,
    READ_ERRORS,
    READERS,
    InputFile,
    Passage,
    read_saved_dataset,
)
from megatron_attnres.errors import InputError

_RECORDS_NAMED_PER_FILE = 5


@dataclass
class CorpusCounts:
    """What became of a corpus while it was read.

    Attributes:
        documents: documents found, empty ones not counted.
        skipped_files: files that could not be read to their end, each named.
        skipped_records: lines or rows that hold no document; the first few of a file are named.
        ignored_files: files in folders whose name no reader knows.
    """

    documents: int = 0
    skipped_files: int = 0
    skipped_records: int = 0
    ignored_files: int = 0


class Corpus:
    """The documents of the given inputs, in the order given, folders sorted by name.

    Iterating reads the inputs from disk; nothing but the passage at hand is held in memory. A file
    that cannot be read or decoded is reported and counted, and the rest is still read.

    Args:
        inputs: files, folders (searched to any depth) or folders of a saved ``datasets`` dataset.
        key: field of a JSON object, or column of a table, that holds the document.
        exclude: names or patterns (``*_test.py``) of files and folders inside folders to pass by.
        report: told about everything that is skipped, one line each; standard error by default.
        flag: that gave the inputs, for errors.

    Raises:
        InputError: an input does not exist, or is a file that no reader knows.
    """

    def __init__(
        self,
        inputs: Sequence[str | Path],
        key: str = "text",
        exclude: Sequence[str] = (),
        report: Callable[[str], None] | None = None,
        flag: str = "--input",
    ) -> None:
        self.key = key
        self._flag = flag
        self._given = f"{flag} {' '.join(map(str, inputs))}"
        self.counts = CorpusCounts()
        self._exclude = tuple(exclude)
        self._report = report or _print_to_stderr
        self._sources: list[InputFile | Path] = []
        self._ignored_files = 0
        for path in inputs:
            self._sources += self._sources_of(Path(path))
        if not self._sources:
            raise InputError(
                f"{self._given}: nothing to read there; {ALLOWED_NAMES} files are allowed"
            )
        self.bytes_on_disk = sum(_size(source) for source in self._sources)
        self.bytes_read = 0

    def __iter__(self) -> Iterator[Passage]:
        """Yield every passage; ``counts`` and ``bytes_read`` (on disk) follow along."""
        self.counts = CorpusCounts(ignored_files=self._ignored_files)
        self.bytes_read = 0
        for source in self._sources:
            start = self.bytes_read
            for passage in self._passages_of(source):
                if isinstance(source, InputFile):
                    # Parquet's footer is read first: the position is no position then, and capped.
                    self.bytes_read = max(self.bytes_read, start + source.position)
                self.counts.documents += passage.ends_document
                yield passage
            self.bytes_read = start + _size(source)

    def require_documents(self) -> None:
        """Raise InputError if the iteration that has ended found no document."""
        if self.counts.documents == 0:
            raise InputError(
                f"{self._given}: {len(self._sources)} file(s) read and no document found; allowed "
                f"are {ALLOWED_NAMES}, JSON objects and tables with text under --json-keys "
                f"{self.key}"
            )

    def _passages_of(self, source: InputFile | Path) -> Iterator[Passage]:
        path = source.path if isinstance(source, InputFile) else source
        skipped_before = self.counts.skipped_records

        def complain(where: str, why: str) -> None:
            self.counts.skipped_records += 1
            if self.counts.skipped_records - skipped_before <= _RECORDS_NAMED_PER_FILE:
                self._report(f"skipped {path}, {where}: {why}")

        try:
            if isinstance(source, InputFile):
                yield from READERS[source.suffix](source, self.key, complain)
            else:
                yield from read_saved_dataset(source, self.key, complain)
        except READ_ERRORS as error:
            self.counts.skipped_files += 1
            self._report(f"skipped {path}: {error}")
        unnamed = self.counts.skipped_records - skipped_before - _RECORDS_NAMED_PER_FILE
        if unnamed > 0:
            self._report(f"skipped {path}: {unnamed} more such records")

    def _sources_of(self, path: Path) -> list[InputFile | Path]:
        if self._is_saved_dataset(path):
            return [path]
        if path.is_dir():
            return list(self._files_in(path))
        if not path.exists():
            raise InputError(f"{self._flag} {path}: no such file or folder")
        file = InputFile.at(path)
        if not file.is_known or not path.is_file():
            raise InputError(
                f"{self._flag} {path}: not a kind of file that can be read; allowed are "
                f"{ALLOWED_NAMES}, folders of them, and folders written by datasets' save_to_disk"
            )
        return [file]

    def _files_in(self, folder: Path) -> Iterator[InputFile]:
        for root, folders, names in os.walk(folder):
            folders[:] = sorted(name for name in folders if not self._is_excluded(name))
            for name in sorted(name for name in names if not self._is_excluded(name)):
                file = InputFile.at(Path(root, name))
                # A broken link is not ignored: reading it names it. A pipe would block for ever.
                if file.is_known and (file.path.is_file() or not file.path.exists()):
                    yield file
                else:
                    self._ignored_files += 1

    def _is_saved_dataset(self, path: Path) -> bool:
        # The marks that datasets' save_to_disk leaves: of one split, and of several.
        if (path / "dataset_dict.json").is_file():
            raise InputError(
                f"{self._flag} {path}: a saved dataset of several splits; give one, such as "
                f"{path / 'train'}"
            )
        return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._exclude)


def standard_library_folder() -> Path:
    """Return the folder of the running Python's standard library: real text on every machine.

    Read it with ``exclude=("site-packages", "__pycache__")``. A few of its test files are
    undecodable on purpose.
    """
    return Path(sysconfig.get_paths()["stdlib"])


def _size(source: InputFile | Path) -> int:
    if isinstance(source, InputFile):
        return source.path.stat().st_size if source.path.exists() else 0
    return sum(part.stat().st_size for part in source.glob("*.arrow"))


def _print_to_stderr(message: str) -> None:
    print(message, file=sys.stderr)
