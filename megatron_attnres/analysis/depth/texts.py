"""The text that weights are measured over, from a prompt, files or a corpus. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_attnres.data.corpora import Corpus
from megatron_attnres.data.indexed_files import check_prefix
from megatron_attnres.data.tokenizers import Tokenizer
from megatron_attnres.errors import InputError

FEWEST_TOKENS = 2


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

    Files are read as tools/preprocess_data.py reads them, and no more of them than needed.

    Raises:
        InputError: files that cannot be read, that hold no document, or too short a text.
    """
    corpus = Corpus(paths, flag="--text")
    ids: list[int] = []
    ended = False
    for passage in corpus:
        ids += [tokenizer.eod] * ended + tokenizer.tokenize(passage.text)
        ended = passage.ends_document
        if len(ids) >= tokens:
            return _text(", ".join(paths), "--text", ids[:tokens])
    corpus.require_documents()
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
