"""Documents to be scored, from text or from a .bin / .idx pair, one at a time."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_attnres.data.corpora import Corpus
from megatron_attnres.data.indexed_files import check_prefix
from megatron_attnres.data.readers import Passage
from megatron_attnres.data.tokenizers import Tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.comparison.settings import CorpusRequest

_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, eq=False)
class Document:
    """What is scored of a document, and what its score is held against.

    Attributes:
        tokens: ids [n], int64, at least one, without an end-of-document id.
        words: parts between white space, as lm-evaluation-harness counts them: one more than there
            are stretches of white space, those at the ends included.
        bytes: of its UTF-8 text.
    """

    tokens: np.ndarray
    words: int
    bytes: int


def check_corpus(corpus: CorpusRequest) -> None:
    """Refuse files that are not there or cannot be read, before anything else is done.

    Raises:
        InputError: see above.
    """
    if corpus.data_path is not None:
        check_prefix(corpus.data_path)
    else:
        _open_corpus(corpus)


def documents_of(corpus: CorpusRequest, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents that are asked for.

    Raises:
        InputError: they cannot be read, or there are none.
    """
    if corpus.data_path is not None:
        documents = indexed_documents(corpus.data_path, tokenizer)
    else:
        documents = text_documents(corpus, tokenizer)
    return first_documents(documents, tokenizer, corpus.max_documents, corpus.max_tokens)


def text_documents(request: CorpusRequest, tokenizer: Tokenizer) -> Iterator[Document]:
    """Documents of files and folders, read as tools/preprocess_data.py reads them.

    What is skipped is reported on standard error. Of a long document its tokens are held in memory,
    not its text; one that alone has all the tokens that are wanted is read no further.

    Args:
        request: with ``text``.
        tokenizer: of the model.

    Raises:
        InputError: an input cannot be read, or there is no document in any.
    """
    corpus = _open_corpus(request)
    found = False
    for document in _documents_of(corpus, tokenizer, request.max_tokens):
        found = True
        yield document
    if not found:
        corpus.require_documents()
        raise InputError(f"--text {request.name}: the documents hold no token; text is needed")


def indexed_documents(prefix: str, tokenizer: Tokenizer) -> Iterator[Document]:
    """Documents of a Megatron-Core indexed dataset; words and bytes are of the detokenised text.

    The end-of-document id that closes a document is left out.

    Args:
        prefix: path without .bin and .idx.
        tokenizer: that made the ids.

    Raises:
        InputError: the pair is damaged, holds no token, or holds an id that the tokenizer lacks.
    """
    check_prefix(prefix)
    # Loaded on use: Megatron-Core takes seconds.
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices
    found = False
    for first, end in pairwise(bounds.tolist()):
        if first == end:
            continue
        tokens = np.concatenate([dataset[index] for index in range(first, end)]).astype(np.int64)
        _check_ids(tokens, prefix, tokenizer)
        if tokens.size and tokens[-1] == tokenizer.eod:
            tokens = tokens[:-1]
        if tokens.size:
            found = True
            yield _of_tokens(tokens, tokenizer)
    if not found:
        raise InputError(f"--data-path {prefix}: its documents hold no token; text is needed")


def first_documents(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    max_documents: int | None,
    max_tokens: int | None,
) -> Iterator[Document]:
    """As many documents as are wanted; the one that goes beyond the tokens is cut.

    Args:
        documents: read no further than needed.
        tokenizer: of their ids; words and bytes of what is left of the cut one are those of its
            detokenised text.
        max_documents: None for all.
        max_tokens: of all of them together; None for all.
    """
    left = max_tokens
    for number, document in enumerate(documents, start=1):
        if left is not None and len(document.tokens) > left:
            document = _of_tokens(document.tokens[:left], tokenizer)
        yield document
        if left is not None:
            left -= len(document.tokens)
        if number == max_documents or left == 0:
            return


def count_words(text: str) -> int:
    """Of a whole document; see ``Document``."""
    return len(_SPACE.findall(text)) + 1


def _of_tokens(tokens: np.ndarray, tokenizer: Tokenizer) -> Document:
    text = tokenizer.detokenize(tokens.tolist())
    return Document(tokens, count_words(text), len(text.encode("utf-8")))


def _documents_of(
    passages: Iterable[Passage], tokenizer: Tokenizer, max_tokens: int | None
) -> Iterator[Document]:
    """Put the passages of long documents together; a document without a token is left out.

    What follows the passage with which a document reaches ``max_tokens`` is left out as well.
    """
    tokens: list[np.ndarray] = []
    spaces = num_bytes = num_tokens = 0
    after_space = False
    for passage in passages:
        text = passage.text
        tokens.append(np.asarray(tokenizer.tokenize(text), dtype=np.int64))
        # A stretch of white space may lie in two passages.
        spaces += len(_SPACE.findall(text)) - (after_space and text[0].isspace())
        after_space = text[-1].isspace()
        num_bytes += len(text.encode("utf-8"))
        num_tokens += len(tokens[-1])
        enough = max_tokens is not None and num_tokens >= max_tokens
        if passage.ends_document or enough:
            if num_tokens:
                yield Document(np.concatenate(tokens), spaces + 1, num_bytes)
            if enough:
                return
            tokens, spaces, num_bytes, num_tokens, after_space = [], 0, 0, 0, False


def _check_ids(tokens: np.ndarray, prefix: str, tokenizer: Tokenizer) -> None:
    if tokens.size and (tokens.min() < 0 or tokens.max() >= tokenizer.vocab_size):
        wrong = tokens.max() if tokens.max() >= tokenizer.vocab_size else tokens.min()
        raise InputError(
            f"--data-path {prefix}: {prefix}.bin holds the token id {wrong}; the vocabulary of "
            f"{tokenizer.vocab_size} allows 0 to {tokenizer.vocab_size - 1}; give a corpus made "
            "with the model's tokenizer"
        )


def _open_corpus(request: CorpusRequest) -> Corpus:
    return Corpus(request.text, request.json_key, request.exclude, flag="--text")
