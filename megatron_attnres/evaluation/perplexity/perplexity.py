"""Perplexity of documents: every token scored once, sums in float64."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_attnres.evaluation.perplexity.documents import Document
from megatron_attnres.evaluation.scoring.windows import Scores, Window, document_windows

Score = Callable[[Sequence[Window]], Sequence[Scores]]

# Scored together: enough to fill any pipeline, little to hold.
_POSITIONS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Perplexity:
    """What documents cost a model.

    Attributes:
        documents: scored.
        tokens: scored, each once; the ends of documents are not.
        words: as lm-evaluation-harness counts them.
        bytes: of UTF-8 text.
        nats: negative log probability of all tokens.
    """

    documents: int
    tokens: int
    words: int
    bytes: int
    nats: float

    @property
    def figures(self) -> dict[str, float]:
        """Nats per token, perplexities per token, word and byte, bits per byte."""
        per_byte = _ratio(self.nats, self.bytes)
        return {
            "nats_per_token": self.nats / self.tokens,
            "token_perplexity": _exp(self.nats / self.tokens),
            "word_perplexity": _exp(_ratio(self.nats, self.words)),
            "byte_perplexity": _exp(per_byte),
            "bits_per_byte": per_byte / math.log(2),
        }


def measure_perplexity(
    documents: Iterable[Document], score: Score, eod: int, context: int, stride: int
) -> Perplexity:
    """Score documents in sliding windows.

    Args:
        documents: at least one.
        score: gives back scores in the windows' order.
        eod: the end-of-document id, from which a document's first token is predicted.
        context: most tokens that the model sees at once.
        stride: tokens between the ends of two windows, 1 to context.
    """
    documents = _Counted(documents)
    windows = (
        window
        for document in documents
        for window in document_windows(document.tokens, eod, context, stride)
    )
    nats = 0.0
    for batch in _batches(windows):
        nats -= sum(scores.total for scores in score(batch))
    return Perplexity(documents.number, documents.tokens, documents.words, documents.bytes, nats)


class _Counted:
    """Passes documents on and adds up what they hold."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = documents
        self.number = self.tokens = self.words = self.bytes = 0

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents:
            self.number += 1
            self.tokens += len(document.tokens)
            self.words += document.words
            self.bytes += document.bytes
            yield document


def _batches(windows: Iterable[Window]) -> Iterator[list[Window]]:
    batch: list[Window] = []
    positions = 0
    for window in windows:
        batch.append(window)
        positions += window.length
        if positions >= _POSITIONS_AT_ONCE:
            yield batch
            batch, positions = [], 0
    if batch:
        yield batch


def _ratio(nats: float, count: int) -> float:
    # Ids of special tokens alone leave no text.
    return nats / count if count else math.inf


def _exp(value: float) -> float:
    """Infinite where float64 ends: a word may cost any number of nats."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
