"""Against torch on the whole vocabulary, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import distributed

from megatron_attnres.model.cross_entropy import vocab_parallel_cross_entropy
from tests.distributed import run_ranks

TOKENS, BATCH, VOCABULARY = 5, 3, 24


def operands(scale=1.0):
    """Whole logits, labels with both ends of every slice among them, and a loss gradient."""
    generator = torch.Generator().manual_seed(0)
    shape = (TOKENS, BATCH, VOCABULARY)
    logits = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (TOKENS, BATCH), generator=generator)
    labels[0] = torch.tensor([0, VOCABULARY - 1, VOCABULARY // 2])
    labels[1, 0] = VOCABULARY // 2 - 1
    return logits, labels, torch.rand(TOKENS, BATCH, generator=generator, dtype=torch.float64)


def expected(logits, labels, gradient):
    logits = logits.double().requires_grad_()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    losses = losses.view_as(labels)
    losses.backward(gradient)
    return losses.detach(), logits.grad


def on_one_rank(dtype, scale):
    """Losses and the whole gradient, gathered from the ranks' slices."""
    group, size = distributed.group.WORLD, distributed.get_world_size()
    logits, labels, gradient = operands(scale)
    own = logits.to(dtype).chunk(size, dim=-1)[distributed.get_rank()].clone().requires_grad_()
    before = own.detach().clone()
    losses = vocab_parallel_cross_entropy(own, labels, group)
    losses.backward(gradient.to(losses.dtype))
    assert torch.equal(own, before), "the logits were written to"
    slices = [torch.empty_like(own.grad) for _ in range(size)]
    distributed.all_gather(slices, own.grad)
    return losses.detach(), torch.cat(slices, dim=-1)


def _job(cases):
    return [on_one_rank(*case) for case in cases]


CASES = [
    (dtype, scale)
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
    for scale in (1.0, 1e3)
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_and_gradients_are_those_of_the_whole_vocabulary(ranks):
    answers = run_ranks(_job, ranks, CASES)
    for answer in answers:
        for (dtype, scale), (losses, gradient) in zip(CASES, answer, strict=True):
            logits, labels, loss_gradient = operands(scale)
            expected_losses, expected_gradient = expected(logits.to(dtype), labels, loss_gradient)
            wide = torch.promote_types(dtype, torch.float32)
            assert (losses.dtype, gradient.dtype) == (wide, dtype)
            exact = 1e-13 if dtype == torch.float64 else 1e-6
            torch.testing.assert_close(losses.double(), expected_losses, rtol=exact, atol=exact)
            # Of bfloat16 only the logits and their gradient are narrow, never what is between.
            narrow = max(exact, torch.finfo(dtype).eps / 2)
            torch.testing.assert_close(
                gradient.double(), expected_gradient, rtol=narrow, atol=exact
            )
    for losses in answers:
        for (of_first, _), (of_this, _) in zip(answers[0], losses, strict=True):
            assert torch.equal(of_first, of_this)
