"""Token sequences cut into windows that fit a model's context, and their scores. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Window:
    """What a model reads at once, and how much of it counts.

    Attributes:
        tokens: ids [n + 1]; the model reads the first n and predicts the last n.
        scored: how many of the last tokens are scored, 1 to n.
    """

    tokens: np.ndarray
    scored: int

    @property
    def length(self) -> int:
        """Positions n that the model computes."""
        return len(self.tokens) - 1


@dataclass(frozen=True, eq=False)
class Scores:
    """Of the scored tokens of a window, in order.

    Attributes:
        log_probabilities: float64, natural, over the padded vocabulary as in training.
        greedy: bool, whether the token is the likeliest of the tokenizer's.
    """

    log_probabilities: np.ndarray
    greedy: np.ndarray

    @property
    def total(self) -> float:
        """Log probability of all of them."""
        return float(self.log_probabilities.sum())


def windows_of(tokens: np.ndarray, scored: int, context: int, stride: int) -> Iterator[Window]:
    """Windows that score each of the last ``scored`` tokens exactly once, in order.

    A scored token with i tokens before it sees the last min(i, context - stride + 1) of them, or
    more. With the stride equal to the context the windows do not overlap, but for the last one: it
    reaches back for as much context as fits, as those of lm-evaluation-harness do.

    Args:
        tokens: ids; the first one is only seen, so at most ``len(tokens) - 1`` can be scored.
        scored: how many of the last tokens to score; 0 makes no window.
        context: most positions of a window, at least 1.
        stride: tokens by which a window's end lies beyond that of the one before, 1 to context.
    """
    last = len(tokens) - 1
    done = last - scored
    while done < last:
        # The next token to score is done + 1. As long as all that precedes it fits, the window is
        # the sequence's first; later ones trade what they score for what that sees.
        end = min(last, max(context, done + stride))
        yield Window(tokens[max(0, end - context) : end + 1], end - done)
        done = end


def document_windows(tokens: np.ndarray, eod: int, context: int, stride: int) -> Iterator[Window]:
    """Windows that score every token of a document.

    The first token is predicted from the end of a document, which it followed in training. The
    document's own end is not scored: lm-evaluation-harness scores none either, and figures per word
    or byte are of the text alone.

    Args:
        tokens: ids of the document, without an end-of-document id.
        eod: the end-of-document id.
        context, stride: as in ``windows_of``.
    """
    return windows_of(np.concatenate(([eod], tokens)), len(tokens), context, stride)
