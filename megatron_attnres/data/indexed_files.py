"""Megatron-Core's .bin / .idx pair, checked before anything trusts it.

Megatron-Core reads the pair by memory maps and asserts little: a truncated or foreign file gives a
traceback, or wrong tokens. The .idx file holds, little-endian::

    9 bytes   magic word             8 bytes   version (1)          1 byte    code of the data type
    8 bytes   number of sequences S  8 bytes   number D of document boundaries
    S int32   length of each sequence, in tokens
    S int64   where it starts in the .bin file, in bytes
    D int64   sequence at which each document starts, and S at the end

and the .bin file the token ids of all sequences, one after the other.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from megatron_attnres.errors import InputError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")

# Codes 6 and 7 are floating-point types, which hold no token ids.
_DTYPES = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    8: np.dtype(np.uint16),
}

_CHUNK_TOKENS = 1 << 21

_REMEDY = "make it anew with tools/preprocess_data.py"


@dataclass(frozen=True)
class IndexedFiles:
    """A .bin / .idx pair that has passed ``check_prefix``.

    Attributes:
        prefix: path without the suffixes.
        dtype: of the token ids in the .bin file.
        sequence_lengths: int32 [sequences], in tokens. What Megatron-Core splits into training,
            validation and test data are sequences; a document is one, or several if it is long.
        documents: number of documents.
    """

    prefix: str
    dtype: np.dtype
    sequence_lengths: np.ndarray
    documents: int

    @property
    def tokens(self) -> int:
        """Number of token ids in the .bin file."""
        return self.tokens_between(0, len(self.sequence_lengths))

    def tokens_between(self, first: int, last: int) -> int:
        """Number of token ids of the sequences ``first`` to ``last - 1``."""
        return int(self.sequence_lengths[first:last].sum(dtype=np.int64))

    def chunks(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yield the token ids from position ``start`` to ``stop`` - 1, a few MB at a time."""
        for position in range(start, stop, _CHUNK_TOKENS):
            yield np.fromfile(
                self.prefix + ".bin",
                dtype=self.dtype,
                count=min(_CHUNK_TOKENS, stop - position),
                offset=position * self.dtype.itemsize,
            )

    def fingerprint(self) -> str:
        """Hash of the .idx file: everything that a shuffled index depends on."""
        with open(self.prefix + ".idx", "rb") as stream:
            digest = sha256()
            while block := stream.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()


def check_prefix(prefix: str) -> IndexedFiles:
    """Return the pair ``<prefix>.bin`` and ``<prefix>.idx`` if it is whole and consistent.

    Raises:
        InputError: a file is missing, empty, truncated, foreign or contradicts the other.
    """
    idx, bin_ = Path(prefix + ".idx"), Path(prefix + ".bin")
    for path in (idx, bin_):
        if not path.is_file():
            raise InputError(
                f"--data-path {prefix}: {path} does not exist; allowed is the prefix of a .bin / "
                ".idx pair, such as tools/preprocess_data.py prints"
            )
        if path.stat().st_size == 0:
            raise InputError(f"--data-path {prefix}: {path} is empty; {_REMEDY}")
    try:
        dtype, lengths, pointers, boundaries = _read_index(prefix, idx)
        bin_bytes = bin_.stat().st_size
    except OSError as error:
        raise InputError(f"--data-path {prefix}: cannot be read ({error.strerror})") from None

    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    if (lengths < 0).any() or not np.array_equal(pointers, ends - lengths * dtype.itemsize):
        raise InputError(
            f"--data-path {prefix}: {idx} is damaged: the sequences do not follow each other; "
            f"{_REMEDY}"
        )
    if (
        boundaries[0] != 0
        or boundaries[-1] != len(lengths)
        or (boundaries[1:] < boundaries[:-1]).any()
    ):
        raise InputError(
            f"--data-path {prefix}: {idx} is damaged: its document boundaries do not run from 0 "
            f"to its {len(lengths)} sequences; {_REMEDY}"
        )
    if ends[-1] != bin_bytes:
        raise InputError(
            f"--data-path {prefix}: {bin_} has {bin_bytes} bytes where {idx} tells of {ends[-1]}; "
            f"one of the two is truncated or from another corpus; {_REMEDY}"
        )
    return IndexedFiles(prefix, dtype, lengths, len(boundaries) - 1)


def _read_index(prefix: str, idx: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Return the data type, lengths, pointers and boundaries, their sizes checked."""
    size = idx.stat().st_size
    with idx.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if header[: len(_MAGIC)] != _MAGIC[: len(header)]:
        raise InputError(
            f"--data-path {prefix}: {idx} is no index of Megatron-Core: it begins with "
            f"{header[:9]!r}, not {_MAGIC!r}; {_REMEDY}"
        )
    if len(header) < _HEADER.size:
        raise InputError(
            f"--data-path {prefix}: {idx} is truncated after {size} bytes, within its header; "
            f"{_REMEDY}"
        )
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != _VERSION:
        raise InputError(
            f"--data-path {prefix}: {idx} has version {version}; {_VERSION} is allowed; {_REMEDY}"
        )
    if code not in _DTYPES:
        raise InputError(
            f"--data-path {prefix}: {idx} has data type code {code}; the codes of whole numbers "
            f"are allowed: {', '.join(map(str, _DTYPES))}; {_REMEDY}"
        )
    expected = _HEADER.size + sequences * (4 + 8) + boundaries * 8
    if size != expected:
        raise InputError(
            f"--data-path {prefix}: {idx} has {size} bytes where its header tells of {expected}; "
            f"it is truncated or foreign; {_REMEDY}"
        )
    if sequences == 0 or boundaries == 0:
        raise InputError(f"--data-path {prefix}: {idx} holds no document; {_REMEDY}")
    offset = _HEADER.size
    arrays = []
    for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", boundaries)):
        arrays.append(np.fromfile(idx, dtype=dtype, count=count, offset=offset))
        offset += arrays[-1].nbytes
    return _DTYPES[code], *arrays
