"""The text that weights are measured over, from a prompt, files or a corpus. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_attnres.data.indexed_files import check_prefix
from megatron_attnres.data.readers import READ_ERRORS, READERS, InputFile, Passage, read_text
from megatron_attnres.data.tokenizers import Tokenizer
from megatron_attnres.errors import InputError

FEWEST_TOKENS = 2
# What a record of a .jsonl or .parquet file keeps its document under.
_KEY = "text"


@dataclass(frozen=True)
class Text:
    """A text as token ids.

    Attributes:
        origin: where it comes from, for titles.
        ids: int64 [tokens]; at least ``FEWEST_TOKENS``.
    """

    origin: str
    ids: np.ndarray


def text_of_prompt(prompt: str, tokenizer: Tokenizer, context: int) -> Text:
    """What was typed.

    Raises:
        InputError: too short, longer than the context, or no text.
    """
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("--prompt: is not UTF-8; give text") from None
    ids = tokenizer.tokenize(prompt)
    if len(ids) > context:
        raise InputError(
            f"--prompt: has {len(ids):,} tokens, the model's context {context:,}; give a shorter "
            "one, or --text, which may be longer"
        )
    return _text("prompt", f"--prompt {prompt[:40]!r}", ids)


def text_of_files(paths: Sequence[str], tokenizer: Tokenizer, tokens: int) -> Text:
    """The first tokens of files, as in training: an end-of-document id between documents.

    Files are read by their names: .txt, .py, .jsonl (documents under ``text``), .parquet; others
    as plain text. No more of them is read than needed.

    Raises:
        InputError: a file that is empty or cannot be read, or too short a text.
    """
    for path in paths:
        _check_file(path)
    ids: list[int] = []
    ended = False
    for path in paths:
        for passage in _passages(path):
            ids += [tokenizer.eod] * ended + tokenizer.tokenize(passage.text)
            ended = passage.ends_document
            if len(ids) >= tokens:
                return _text(", ".join(paths), "--text", ids[:tokens])
    return _text(", ".join(paths), f"--text {' '.join(paths)}", ids)


def text_of_corpus(prefix: str, vocab_size: int, tokens: int) -> Text:
    """The first tokens of a .bin / .idx pair.

    Raises:
        InputError: no such pair, a damaged one, ids that the model does not have, or too short.
    """
    files = check_prefix(prefix)
    parts = list(files.chunks(0, min(tokens, files.tokens)))
    ids = np.concatenate(parts or [np.zeros(0)]).astype(np.int64)
    name = f"--data-path {prefix}"
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise InputError(
            f"{name}: holds the token id {ids.max() if ids.max() >= vocab_size else ids.min()}, "
            f"the model has {vocab_size:,}; give a corpus of its tokenizer"
        )
    return _text(prefix, name, ids)


def _text(origin: str, name: str, ids: Sequence[int] | np.ndarray) -> Text:
    if len(ids) < FEWEST_TOKENS:
        raise InputError(
            f"{name}: has {len(ids)} token{'s' * (len(ids) != 1)}; at least {FEWEST_TOKENS} are "
            "needed"
        )
    return Text(origin, np.asarray(ids, dtype=np.int64))


def _check_file(path: str) -> None:
    try:
        if not Path(path).is_file():
            raise InputError(f"--text {path}: no such file; give files of text")
        if Path(path).stat().st_size == 0:
            raise InputError(f"--text {path}: is empty; give files of text")
    except OSError as error:
        raise InputError(f"--text {path}: {error.strerror}; give files of text") from None


def _passages(path: str) -> Iterator[Passage]:
    def refuse(where: str, why: str) -> None:
        raise InputError(f"--text {path}: {where}: {why}")

    file = InputFile.at(Path(path))
    try:
        yield from READERS.get(file.suffix, read_text)(file, _KEY, refuse)
    except READ_ERRORS as error:
        reason = " ".join(str(error).split())
        raise InputError(f"--text {path}: cannot be read as text ({reason})") from None
