"""How well token frequencies alone predict a text: the yardstick of the quickstart's loss."""

from collections.abc import Iterable

import numpy as np
import torch

from megatron_attnres.data.blends import parse_blend, split_bounds
from megatron_attnres.data.configuration import DataConfig
from megatron_attnres.data.indexed_files import check_prefix


def training_token_counts(config: DataConfig, vocab_size: int) -> np.ndarray:
    """Count every token of the training split once; float64 [vocab_size].

    In a blend with weights each corpus counts by its weight, as training draws from it. The .bin
    files are streamed: 10 million tokens take about 0.1 s.

    Raises:
        InputError: the files, the blend or the split cannot be used.
    """
    blend = parse_blend(config.data_path)
    counts = []
    for prefix in blend.prefixes:
        pair = check_prefix(prefix)
        first, last = split_bounds(config.split, len(pair.sequence_lengths))[0]
        start = pair.tokens_between(0, first)
        stop = start + pair.tokens_between(first, last)
        counts.append(sum_counts(pair.chunks(start, stop), vocab_size))
    total = sum(count.sum() for count in counts)
    if blend.weights is None or len(counts) == 1:
        return np.sum(counts, axis=0, dtype=np.float64)
    shares = np.array(blend.weights) / sum(blend.weights)
    return np.sum(
        [
            share * total / max(count.sum(), 1) * count
            for share, count in zip(shares, counts, strict=True)
        ],
        axis=0,
    )


def sum_counts(chunks: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """Count the token ids of all ``chunks``; int64 [vocab_size]."""
    total = np.zeros(vocab_size, dtype=np.int64)
    for chunk in chunks:
        total += np.bincount(chunk, minlength=vocab_size)
    return total


def label_counts(labels: torch.Tensor, loss_mask: torch.Tensor, vocab_size: int) -> np.ndarray:
    """Count the labels that a loss counts; int64 [vocab_size].

    Args:
        labels: int64 [b, s].
        loss_mask: [b, s], zero where a label does not count.
        vocab_size: every label is below it.
    """
    return sum_counts([labels[loss_mask > 0].cpu().numpy()], vocab_size)


def unigram_entropy(training_counts: np.ndarray, evaluation_counts: np.ndarray) -> float:
    """Nats per token of the evaluation tokens under the frequencies of the training tokens.

    It is the loss of a model that knows how frequent each token is and nothing else. One is added
    to every training count, so that a token that training never saw has a finite cost.

    Args:
        training_counts: [vocab_size].
        evaluation_counts: [vocab_size], at least one token.
    """
    smoothed = training_counts + 1.0
    nats = np.log(smoothed.sum()) - np.log(smoothed)
    return float((evaluation_counts * nats).sum() / evaluation_counts.sum())
