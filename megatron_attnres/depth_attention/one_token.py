"""Both phases for a single token on a CPU, without gradients: a decode step of batch 1.

There a product over h takes a microsecond, and what costs is the number of torch's operations:
everything that is one number per source is done in Python.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_attnres.depth_attention.phase_one import Attended


def is_one_token(source: Tensor) -> bool:
    """Whether this file serves a depth state of such sources."""
    return (
        source.numel() == source.shape[-1]
        and source.device.type == "cpu"
        and not torch.is_grad_enabled()
    )


def inverse_rms_of_token(source: Tensor, eps: float, wide: torch.dtype) -> float:
    """``statistics.inverse_rms`` as a number of Python's."""
    row = source.view(-1).to(wide)
    return 1 / math.sqrt(torch.dot(row, row).item() / row.shape[0] + eps)


def attend_to_summaries_of_token(
    summaries: Sequence[Tensor],
    inverse_rms: Sequence[float],
    directions: Tensor,
    newest_bias: Tensor | None = None,
) -> tuple[Attended, ...]:
    """``phase_one.attend_to_summaries``; inverse RMS and log-sums are numbers of Python's."""
    shape = summaries[0].shape
    values = torch.cat([summary.view(1, -1) for summary in summaries])
    # Not as matrix products: to start their threads takes longer than these sums.
    dots = (directions.unsqueeze(1) * values.to(directions.dtype)).sum(dim=-1).tolist()
    weights, log_sums = [], []
    for query, row in enumerate(dots):
        logits = [dot * inverse for dot, inverse in zip(row, inverse_rms, strict=True)]
        if query == 0 and newest_bias is not None:
            logits[-1] += newest_bias.item()
        largest = max(logits)
        shares = [math.exp(logit - largest) for logit in logits]
        total = sum(shares)
        weights.append([share / total for share in shares])
        log_sums.append(largest + math.log(total))
    factors = torch.tensor(weights, dtype=values.dtype).unsqueeze(-1)
    mixed = (factors * values).sum(dim=1)
    return tuple(
        Attended(one.view(shape), log_sum)
        for one, log_sum in zip(mixed.unbind(), log_sums, strict=True)
    )


def merge_partial_sum_of_token(
    attended: Attended,
    partial: Tensor,
    direction: Tensor,
    eps: float,
    recency_bias: Tensor | None = None,
) -> Tensor:
    """``phase_two.merge_partial_sum``."""
    row = partial.view(-1).to(direction.dtype)
    mean_square = torch.dot(row, row).item() / row.shape[0]
    logit = torch.dot(row, direction).item() / math.sqrt(mean_square + eps)
    if recency_bias is not None:
        logit += recency_bias.item()
    lead = attended.log_sum - logit
    smaller = math.exp(-abs(lead))
    shares = (1 / (1 + smaller), smaller / (1 + smaller))
    share, own_share = shares if lead >= 0 else shares[::-1]
    return torch.mul(attended.mixed, share).add_(partial, alpha=own_share)
