"""Documents of one input file, or of one saved dataset, streamed.

Every reader is a generator of passages. It raises one of ``READ_ERRORS`` where the rest of its
file cannot be read, and reports a single bad record to ``complain`` and goes on.
"""

import codecs
import gzip
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from zlib import error as zlib_error

PASSAGE_BYTES = 1 << 20
"""A text file is read in passages of about this size, so that its own size does not matter."""

_PARQUET_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Passage:
    """A document, or a part of a long one.

    Attributes:
        text: never empty.
        ends_document: whether the document ends here.
    """

    text: str
    ends_document: bool = True


class Complain(Protocol):
    """Told about a record that cannot be used: where it is in the file, and why."""

    def __call__(self, where: str, why: str) -> None:
        """Take note of the record."""
        ...


class UnreadableError(Exception):
    """A file whose bytes are fine but which does not hold what it should."""


READ_ERRORS = (OSError, EOFError, UnicodeDecodeError, zlib_error, UnreadableError)
"""What a reader may raise for a file that it cannot read."""


@dataclass
class InputFile:
    """A file on disk, opened through its compression.

    Attributes:
        path: the file.
        suffix: what the file holds, without the compression: ``.txt`` for ``a.txt.gz``.
        compression: ``.gz``, ``.zst`` or nothing.
    """

    path: Path
    suffix: str
    compression: str
    _raw: BinaryIO | None = field(default=None, repr=False)

    @classmethod
    def at(cls, path: Path) -> "InputFile":
        """Sort ``path`` by its name alone."""
        compression = path.suffix if path.suffix in (".gz", ".zst") else ""
        return cls(path, Path(path.name.removesuffix(compression)).suffix, compression)

    @property
    def is_known(self) -> bool:
        """Whether a reader exists for files of this name."""
        return self.suffix in READERS and not (self.suffix == ".parquet" and self.compression)

    @property
    def position(self) -> int:
        """Bytes on disk that have been read so far."""
        return self._raw.tell() if self._raw and not self._raw.closed else 0

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file for reading decompressed bytes."""
        with self.path.open("rb") as self._raw:
            if self.compression == ".gz":
                with gzip.GzipFile(fileobj=self._raw) as stream:
                    yield stream
            elif self.compression == ".zst":
                # Arrow rather than zstandard, whose stream ends silently where a file is truncated.
                import pyarrow

                raw = pyarrow.PythonFile(self._raw, mode="r")
                yield io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), 1 << 16)
            else:
                yield self._raw


def read_text(file: InputFile, key: str, complain: Complain) -> Iterator[Passage]:
    """Read a file that is one document. Strict UTF-8; ``key`` has no meaning here."""
    del key, complain
    with file.open() as stream:
        head = stream.read(PASSAGE_BYTES + 1)
        if len(head) <= PASSAGE_BYTES:
            if head:
                yield Passage(head.decode("utf-8"))
            return
    # A long document is read twice: nothing of a file that turns out to be undecodable is used.
    for _ in _decoded(file):
        pass
    held = ""
    for text in _decoded(file):
        held += text
        if len(held) > PASSAGE_BYTES:
            # Something is always held back, for the last passage of the document to be marked.
            cut = held.rfind("\n", 0, len(held) - 1) + 1 or len(held) - 1
            yield Passage(held[:cut], ends_document=False)
            held = held[cut:]
    yield Passage(held)


def read_jsonl(file: InputFile, key: str, complain: Complain) -> Iterator[Passage]:
    """Read JSON lines: one object a line, its document under ``key``."""
    with file.open() as stream:
        for number, line in enumerate(stream, start=1):
            if line.isspace():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                complain(f"line {number}", f"not JSON in UTF-8 ({error})")
                continue
            text = record.get(key) if isinstance(record, dict) else None
            yield from _document(text, f"line {number}", key, complain)


def read_parquet(file: InputFile, key: str, complain: Complain) -> Iterator[Passage]:
    """Read a Parquet file, a few rows at a time; documents are in the column ``key``."""
    from pyarrow.parquet import ParquetFile

    with file.open() as stream, _unreadable_if_arrow_fails():
        table = ParquetFile(stream)
        _require_column(key, table.schema_arrow.names)
        row = 0
        for batch in table.iter_batches(_PARQUET_ROWS, columns=[key], use_threads=False):
            for text in batch.column(0).to_pylist():
                row += 1
                yield from _document(text, f"row {row}", key, complain)


def read_saved_dataset(folder: Path, key: str, complain: Complain) -> Iterator[Passage]:
    """Read a folder written by ``datasets.Dataset.save_to_disk``; it stays on disk."""
    from datasets import load_from_disk

    with _unreadable_if_arrow_fails():
        try:
            dataset = load_from_disk(str(folder))
        except (ValueError, KeyError, TypeError) as error:  # its JSON files are not what they were
            raise UnreadableError(f"not a saved dataset ({error})") from None
        _require_column(key, dataset.column_names)
        for row, record in enumerate(dataset.select_columns([key]), start=1):
            yield from _document(record[key], f"row {row}", key, complain)


READERS: dict[str, Callable[[InputFile, str, Complain], Iterator[Passage]]] = {
    ".txt": read_text,
    ".py": read_text,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
"""The reader of each kind of file."""

ALLOWED_NAMES = ".txt, .py, .jsonl (each also .gz or .zst) and .parquet"


@contextmanager
def _unreadable_if_arrow_fails() -> Iterator[None]:
    from pyarrow.lib import ArrowException

    try:
        yield
    except ArrowException as error:
        raise UnreadableError(str(error).splitlines()[0]) from None


def _require_column(key: str, columns: list[str]) -> None:
    if key not in columns:
        raise UnreadableError(f"no column {key!r}; it has {', '.join(columns)}")


def _decoded(file: InputFile) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with file.open() as stream:
        while chunk := stream.read(PASSAGE_BYTES):
            yield decoder.decode(chunk)
        yield decoder.decode(b"", final=True)


def _document(text: Any, where: str, key: str, complain: Complain) -> Iterator[Passage]:
    if not isinstance(text, str):
        complain(where, f"no text under {key!r}")
        return
    try:
        # JSON can spell half a surrogate pair, which is no character and has no UTF-8.
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        complain(where, f"not encodable as UTF-8 ({error.reason})")
        return
    if text:
        yield Passage(text)
