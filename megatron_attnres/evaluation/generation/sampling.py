"""The next token of every sequence of a batch, from the model's logits."""

from collections.abc import Callable, Sequence

import torch
from numpy.random import SeedSequence
from torch import Tensor

from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.generation.settings import SamplingSettings

Warper = Callable[[Tensor | None, Tensor], Tensor]


class Sampler:
    """Draws for each sequence with random numbers of its own.

    They come from the seed and the sequence's place, so what is drawn depends on the logits alone,
    and not on the batch that the sequence is in.

    Args:
        sampling: how.
        vocab_size: of the tokenizer; a model's vocabulary may be padded beyond it, and none of
            those ids is ever chosen.
        places: of each sequence of the batch, index of the prompt and of the sample.
        device: of the logits.
    """

    def __init__(
        self,
        sampling: SamplingSettings,
        vocab_size: int,
        places: Sequence[tuple[int, int]],
        device: torch.device,
    ) -> None:
        self._vocab_size = vocab_size
        self._warpers = [] if sampling.is_greedy else _warpers(sampling)
        self._generators = [
            torch.Generator(device).manual_seed(_seed_of(sampling.seed, *place)) for place in places
        ]
        self._is_greedy = sampling.is_greedy

    def choose(self, logits: Tensor, sequences: Sequence[int]) -> list[int]:
        """One token for each of some sequences.

        Args:
            logits: of the whole batch, [b, vocabulary].
            sequences: which to choose for; the others' random numbers stay where they are.

        Raises:
            InputError: logits are not finite.
        """
        scores = logits[:, : self._vocab_size]
        if len(sequences) < logits.shape[0]:
            scores = scores[list(sequences)]
        largest, likeliest = scores.max(dim=-1)
        # NaN is larger than any number here.
        if not largest.isfinite().all():
            raise InputError(
                "the model's logits are not finite: its weights are damaged, or training diverged"
            )
        if self._is_greedy:
            return likeliest.tolist()
        # Shifted, so that the smallest temperature overflows to zero probability, not to NaN.
        scores = scores - largest.unsqueeze(-1)
        for warp in self._warpers:
            scores = warp(None, scores)
        drawn = [
            torch.multinomial(row, 1, generator=self._generators[sequence])
            for row, sequence in zip(scores.softmax(dim=-1), sequences, strict=True)
        ]
        return torch.cat(drawn).tolist()


def _warpers(sampling: SamplingSettings) -> list[Warper]:
    """Those of transformers, in its order."""
    # Takes seconds, which greedy text need not pay for.
    from transformers.generation.logits_process import (
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    # A smaller one is zero among the logits' numbers.
    temperature = max(float(sampling.temperature), torch.finfo(torch.float32).tiny)
    warpers: list[Warper] = [TemperatureLogitsWarper(temperature)]
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


def _seed_of(seed: int, prompt: int, sample: int) -> int:
    """Unlike that of any other place, and of any other seed."""
    return int(SeedSequence([seed, prompt, sample]).generate_state(1, "uint64")[0] >> 1)
