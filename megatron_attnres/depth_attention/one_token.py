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
    values = torch.cat(tuple(summaries)).view(len(summaries), -1)
    wide = values.to(directions.dtype)
    # A product of one row, as full mode and the head need it, is a single operation; to start the
    # threads of larger ones takes longer than these sums.
    is_one_query = directions.shape[0] == 1
    if is_one_query:
        dots = torch.mm(directions, wide.t())
    else:
        dots = (directions.unsqueeze(1) * wide).sum(dim=-1)
    weights, log_sums = [], []
    for query, row in enumerate(dots.tolist()):
        logits = [dot * inverse for dot, inverse in zip(row, inverse_rms, strict=True)]
        if query == 0 and newest_bias is not None:
            logits[-1] += newest_bias.item()
        largest = max(logits)
        shares = [math.exp(logit - largest) for logit in logits]
        total = sum(shares)
        weights.append([share / total for share in shares])
        log_sums.append(largest + math.log(total))
    factors = torch.tensor(weights, dtype=wide.dtype)
    mixed = factors @ wide if is_one_query else (factors.unsqueeze(-1) * wide).sum(dim=1)
    return tuple(map(Attended, mixed.to(values.dtype).view(-1, *shape).unbind(), log_sums))


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
    # From the smaller share, which has all its digits then.
    share = smaller / (1 + smaller)
    if lead >= 0:
        return torch.lerp(attended.mixed, partial, share)
    return torch.lerp(partial, attended.mixed, share)
