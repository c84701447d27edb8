"""Cross entropy over a vocabulary that is split across tensor-parallel ranks.

Megatron-Core's own casts logits to float32 whatever they are, which would end exactness in
float64; this one widens to float32 only what is narrower.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: distributed.ProcessGroup
) -> Tensor:
    """Loss of every token, in nats.

    Args:
        logits: this rank's slice of the vocabulary, [s, b, vocabulary / TP].
        labels: token ids of the whole vocabulary, [s, b].
        group: tensor-parallel group.

    Returns:
        [s, b], float32 (float64 for float64 logits), the same on all ranks of the group.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if group.size() == 1:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(
            labels
        )
    return _VocabParallelCrossEntropy.apply(logits, labels, group)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """log(sum_j exp(x_j)) - x_label with three reductions of [s, b] over the group."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: distributed.ProcessGroup
    ) -> Tensor:
        largest = logits.amax(dim=-1)
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group)
        shifted = logits - largest.unsqueeze(-1)

        local = labels - group.rank() * logits.shape[-1]
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        label_logit = shifted.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0.0)
        distributed.all_reduce(label_logit, group=group)

        softmax = shifted.exp_()
        total = softmax.sum(dim=-1)
        distributed.all_reduce(total, group=group)
        softmax /= total.unsqueeze(-1)
        ctx.save_for_backward(softmax, local, elsewhere)
        return total.log() - label_logit

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        softmax, local, elsewhere = ctx.saved_tensors
        here = (~elsewhere).to(softmax.dtype).unsqueeze(-1)
        grad = softmax.scatter_add(-1, local, -here)
        return grad.mul_(grad_loss.unsqueeze(-1)), None, None
