"""Log probabilities of given tokens by a model on any layout: what every evaluation is made of."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from megatron_attnres.evaluation.scoring.batching import Run, micro_batches_of_rank, plan_runs
from megatron_attnres.evaluation.scoring.chunk import TokenResults
from megatron_attnres.evaluation.scoring.windows import Scores, Window
from megatron_attnres.parallel.cpu import device
from megatron_attnres.parallel.groups import ParallelGroups
from megatron_attnres.pipeline.chunk import PipelineChunk
from megatron_attnres.pipeline.step import PipelineStep

Batch = dict[str, Tensor]


class Scorer:
    """Scores windows with all ranks of a job.

    Args:
        step: over a model made of ScoringChunk; the scorer changes its shape.
        groups: process groups.
        vocab_size: ids of the tokenizer; those above pad the vocabulary.
        batch_size: windows of a micro-batch.
        progress: told of every micro-batch of all replicas, when it begins, how many positions it
            computes, padding left out; on the first stage.
    """

    def __init__(
        self,
        step: PipelineStep,
        groups: ParallelGroups,
        vocab_size: int,
        batch_size: int,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self._step = step
        self._groups = groups
        self._batch_size = batch_size
        self._progress = progress
        self._longest = step.seq_length
        for chunk in step.chunks:
            chunk.module.predictable_ids = vocab_size

    @torch.no_grad()
    def score(self, windows: Sequence[Window]) -> list[Scores]:
        """Score windows. Collective; all ranks give the same windows.

        Returns:
            Scores in the order of the windows on rank 0; an empty list on the others.

        Raises:
            ValueError: a window is longer than the model's context.
        """
        if any(window.length > self._longest for window in windows):
            longest = max(window.length for window in windows)
            raise ValueError(f"a window has {longest} positions, the model {self._longest}")
        ends = np.cumsum([0, *(window.scored for window in windows)])
        # Log probabilities and greedy flags; every token is found by one rank, the others add zero.
        found = np.zeros((2, ends[-1]))
        for run in self._plan(windows):
            own = self._micro_batches(run)
            for indices, results in self._run(run, own, windows):
                _collect(results, indices, windows, ends, found)
        flat = torch.from_numpy(found).to(device())
        distributed.reduce(flat, dst=0)
        if distributed.get_rank() != 0:
            return []
        log_probabilities, greedy = flat.cpu().numpy()
        return [
            Scores(log_probabilities[start:end], greedy[start:end] > 0)
            for start, end in pairwise(ends)
        ]

    def _plan(self, windows: Sequence[Window]) -> list[Run]:
        layout = self._groups.layout
        multiple = layout.tensor if layout.sequence_parallel else 1
        lengths = [window.length for window in windows]
        return plan_runs(lengths, self._batch_size, self._longest, multiple)

    def _micro_batches(self, run: Run) -> list[tuple[int, ...]]:
        layout = self._groups.layout
        stages = layout.pipeline if layout.virtual_pipeline > 1 else 1
        return micro_batches_of_rank(run, self._groups.data_rank, layout.data, stages)

    def _run(
        self, run: Run, own: Sequence[tuple[int, ...]], windows: Sequence[Window]
    ) -> list[tuple[tuple[int, ...], TokenResults]]:
        """Micro-batches and results, if this rank is their source; else nothing."""
        # Of a few windows no more rows than there are, the same on all ranks.
        rows = max(map(len, run.micro_batches))
        self._step = self._step.resized(run.seq_length, rows)
        batches = self._batches(run, own, windows, rows)
        record = self._step.run(
            _forward, [batches for _ in self._step.chunks], len(own), forward_only=True
        )
        # All tensor-parallel ranks of the last stage have them, the other stages nothing.
        if self._groups.tensor_rank != 0 or not record.losses:
            return []
        results = [kept["results"] for kept in record.losses]
        return list(zip(own, results, strict=True))

    def _batches(
        self, run: Run, own: Sequence[tuple[int, ...]], windows: Sequence[Window], batch_size: int
    ) -> Iterator[Batch]:
        """Padding is on the right, where causal attention does not let it matter."""
        replicas = self._groups.layout.data
        for number, indices in enumerate(own):
            rows = torch.zeros((batch_size, run.seq_length + 1), dtype=torch.int64)
            for row, index in enumerate(indices):
                tokens = windows[index].tokens
                rows[row, : len(tokens)] = torch.as_tensor(tokens, dtype=torch.int64)
            together = run.micro_batches[number * replicas : (number + 1) * replicas]
            self._progress(sum(windows[index].length for one in together for index in one))
            rows = rows.to(device())
            yield {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


def _forward(iterator: Iterator[Batch], chunk: PipelineChunk) -> tuple[Any, Callable[..., Any]]:
    """Megatron-Core's forward step; only the first and the last chunk read tokens."""
    batch = next(iterator) if chunk.is_first or chunk.is_last else {}
    return chunk(batch.get("tokens"), batch.get("labels")), _keep


def _keep(results: TokenResults) -> tuple[Tensor, dict[str, TokenResults]]:
    """In place of a loss, which the schedule asks for and would differentiate."""
    return results.losses.new_zeros(()), {"results": results}


def _collect(
    results: TokenResults,
    indices: Sequence[int],
    windows: Sequence[Window],
    ends: np.ndarray,
    found: np.ndarray,
) -> None:
    """Put a micro-batch's scored tokens in their places."""
    losses, greedy = results.losses.cpu().numpy(), results.greedy.cpu().numpy()
    for row, index in enumerate(indices):
        window = windows[index]
        last = slice(window.length - window.scored, window.length)
        place = slice(ends[index], ends[index + 1])
        found[0, place] = -losses[row, last].astype(np.float64)
        found[1, place] = greedy[row, last]
