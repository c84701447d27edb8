"""A chunk of the model that says how likely given tokens are, and which are the likeliest."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.model.cross_entropy import vocab_parallel_cross_entropy
from megatron_attnres.model.gpt import GPTChunk

# Logits of a slice of the sequence that a rank holds at once: 256 MiB in float32.
_MOST_LOGITS = 1 << 26


class TokenResults(NamedTuple):
    """Of every token of a micro-batch.

    Attributes:
        losses: [b, s] float32, negative natural log probabilities over the padded vocabulary, as in
            training.
        greedy: [b, s] bool, whether the label is the likeliest token.
    """

    losses: Tensor
    greedy: Tensor


class ScoringChunk(GPTChunk):
    """A GPTChunk whose last chunk gives back TokenResults.

    Attributes:
        predictable_ids: ids from here on only pad the vocabulary; none of them counts as the
            likeliest token. None: all ids are real.
    """

    predictable_ids: int | None = None

    def result_of(self, state: DepthState, labels: Tensor) -> TokenResults:
        """Score the labels, a slice of the sequence at a time.

        Args:
            state: after all layers.
            labels: [b, s].
        """
        hidden = self.final_hidden(state)
        tp = self.groups.tp
        # Under sequence parallelism a rank's hidden states are its shard of the sequence, and the
        # output layer puts the shards' slices one after the other.
        shards = tp.size() if self.config.sequence_parallel else 1
        by_shard = labels.transpose(0, 1).unflatten(0, (shards, -1))
        losses = torch.empty(by_shard.shape, dtype=torch.float32, device=labels.device)
        greedy = torch.empty_like(by_shard, dtype=torch.bool)
        for part in self._slices(*by_shard.shape):
            logits = self.output(hidden[part])[0]
            wanted = by_shard[:, part].flatten(0, 1).contiguous()
            likeliest = likeliest_ids(logits, self.predictable_ids, tp)
            found = vocab_parallel_cross_entropy(logits, wanted, tp)
            losses[:, part] = found.unflatten(0, (shards, -1))
            greedy[:, part] = (likeliest == wanted).unflatten(0, (shards, -1))
        return TokenResults(losses.flatten(0, 1).t(), greedy.flatten(0, 1).t())

    def _slices(self, shards: int, positions: int, batch: int) -> Iterator[slice]:
        """Cuts a shard's positions so that a slice's logits stay small."""
        logits_of_position = shards * batch * self.output.weight.shape[0]
        step = max(1, _MOST_LOGITS // logits_of_position)
        for first in range(0, positions, step):
            yield slice(first, first + step)


def likeliest_ids(
    logits: Tensor, predictable_ids: int | None, group: distributed.ProcessGroup
) -> Tensor:
    """The id of the largest logit over a vocabulary that is split across tensor-parallel ranks.

    Of several largest ones the lowest id, however the vocabulary is split.

    Args:
        logits: this rank's slice of the vocabulary, [s, b, vocabulary / TP].
        predictable_ids: only ids below it count; None for all.
        group: tensor-parallel group.

    Returns:
        [s, b] int64, the same on all ranks of the group.
    """
    width = logits.shape[-1]
    first = group.rank() * width
    own = width if predictable_ids is None else min(width, max(0, predictable_ids - first))
    if own == 0:
        largest = logits.new_full(logits.shape[:-1], -torch.inf)
        ids = torch.zeros_like(largest, dtype=torch.int64)
    else:
        largest, ids = logits[..., :own].max(dim=-1)
    if group.size() == 1:
        return ids
    overall = largest.clone()
    distributed.all_reduce(overall, distributed.ReduceOp.MAX, group)
    nowhere = torch.iinfo(torch.int64).max
    ids = (ids + first).masked_fill(largest < overall, nowhere)
    distributed.all_reduce(ids, distributed.ReduceOp.MIN, group)
    return ids
