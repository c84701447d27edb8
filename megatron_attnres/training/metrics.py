"""What an iteration is measured by."""

import json
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from megatron_attnres.parallel.cpu import device
from megatron_attnres.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class IterationMetrics:
    """One object of the metrics file.

    Attributes:
        iteration: from 1.
        lm_loss: mean over the global batch before the update, nats per token.
        grad_norm: of all parameters before clipping.
        learning_rate: that the update used.
        tokens: trained on since the run's first iteration, this one included.
        step_seconds: wall time of the iteration without validation and saving.
        tokens_per_second: of the iteration, over all ranks.
        tokens_per_second_per_rank: the same for the average rank.
        model_tflops_per_rank: 10^12 operations a second that the model needs (model/flops.py; what
            is recomputed counts nothing), for the average rank.
        p2p_bytes_forward, p2p_bytes_backward: payload that all ranks sent over pipeline hops.
        peak_memory_bytes: of the rank that used most, since start.
        peak_cached_sources: most block summaries that a rank's cache held at once; an entry each.
        compute_seconds: forward and backward without waits for transfers, of the average rank.
        p2p_wait_seconds: waits for transfers, of the average rank.
        gradient_seconds: summing gradients of model-parallel ranks, of the average rank.
        update_seconds: averaging gradients, norm and AdamW, of the average rank.
        update_skipped: the gradient was not finite, weights are unchanged.
        skipped_steps: of the run so far.
        save_pause_seconds: that training stood still for a save, where one was begun.
        mfu: model_tflops_per_rank over what the accelerator can do, where that is known.
        validation_loss: nats per token, where validation ran after the iteration.
    """

    iteration: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_rank: float
    model_tflops_per_rank: float
    p2p_bytes_forward: int
    p2p_bytes_backward: int
    peak_memory_bytes: int
    peak_cached_sources: int
    compute_seconds: float
    p2p_wait_seconds: float
    gradient_seconds: float
    update_seconds: float
    update_skipped: bool
    skipped_steps: int
    mfu: float | None = None
    validation_loss: float | None = None
    save_pause_seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """By name, without what the iteration does not have."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def mean_loss_of_batch(losses: Sequence[dict[str, Tensor]], groups: ParallelGroups) -> float:
    """Mean of the micro-batches' losses over the global batch, on every rank. Collective.

    The sum runs over the micro-batches in order, then over data-parallel ranks, then adds the
    zeros of the stages that have none: so it is the same number, to the last bit, for every
    pipeline layout.
    """
    total = torch.zeros((), dtype=torch.float64, device=device())
    for loss in losses:
        total += loss["lm_loss"].to(torch.float64) / len(losses)
    distributed.all_reduce(total, group=groups.collection.dp)
    distributed.all_reduce(total, group=groups.collection.pp)
    return total.item() / groups.layout.data


class RankFigures(NamedTuple):
    """What one rank measured of an iteration; names as in ``IterationMetrics``."""

    p2p_bytes_forward: int
    p2p_bytes_backward: int
    peak_memory_bytes: int
    peak_cached_sources: int
    compute_seconds: float
    p2p_wait_seconds: float
    gradient_seconds: float
    update_seconds: float


def figures_of_all_ranks(own: RankFigures) -> list[RankFigures]:
    """By rank. Collective. Counts stay exact below 2^53."""
    sent = torch.tensor(own, dtype=torch.float64, device=device())
    everyone = torch.empty(
        distributed.get_world_size() * len(sent), dtype=torch.float64, device=device()
    )
    distributed.all_gather_into_tensor(everyone, sent)
    rows = everyone.view(-1, len(sent)).tolist()
    return [RankFigures(*map(int, row[:4]), *row[4:]) for row in rows]


def average(figures: Sequence[RankFigures]) -> dict[str, int | float]:
    """The ranks' figures as the metrics have them: bytes in all, the largest peaks, mean times."""
    combine = dict.fromkeys(RankFigures._fields, fmean)
    combine |= dict.fromkeys(("p2p_bytes_forward", "p2p_bytes_backward"), sum)
    combine |= dict.fromkeys(("peak_memory_bytes", "peak_cached_sources"), max)
    return {name: how([getattr(one, name) for one in figures]) for name, how in combine.items()}


def peak_memory() -> int:
    """This rank's peak memory in bytes: CUDA's allocator, else the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux KiB.
    return peak if sys.platform == "darwin" else peak * 1024


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a metrics file."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
