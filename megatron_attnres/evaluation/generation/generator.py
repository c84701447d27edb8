"""Continuing prompts, token by token, on all ranks of a job.

Sequences of a batch grow together, whatever the lengths of their prompts: the model takes as many
tokens at once as the shortest prompt has, and then one of every sequence per step, which is a
longer prompt's own next one until that is used up. So there is neither padding nor a mask.

The first rank of a tensor-parallel group chooses and tells the others; replicas share the batches.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, distributed

from megatron_attnres.data.tokenizers import Tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.generation.batches import batches_of
from megatron_attnres.evaluation.generation.choosing import (
    Beginning,
    Chooser,
    Interrupted,
    Listener,
)
from megatron_attnres.evaluation.generation.settings import (
    Continuation,
    Generation,
    GenerationSettings,
    Pace,
    check_generation,
)
from megatron_attnres.model.gpt import GPTChunk
from megatron_attnres.model.inference import Decoder
from megatron_attnres.parallel.cpu import device
from megatron_attnres.parallel.groups import ParallelGroups

# What the choosing rank tells the others of its group, before the tokens.
_GO_ON, _END, _FAIL = range(3)


class Generator:
    """Continues prompts with one model.

    Args:
        model: all of it; tensor and sequence parallelism may be on.
        groups: of the job.
        tokenizer: of the model.
    """

    def __init__(self, model: GPTChunk, groups: ParallelGroups, tokenizer: Tokenizer) -> None:
        self._model = model
        self._groups = groups
        self._tokenizer = tokenizer

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings,
        first_prompt: int = 0,
        listen: Listener | None = None,
        interrupted: Interrupted | None = None,
    ) -> Generation:
        """Continue every prompt. Collective over all ranks of the job.

        A text depends on its prompt, the settings and its place alone, not on the batch that it
        is in, but for the rounding of logits.

        Args:
            prompts: ids of each, at least one; they fit the model's context together with
                ``max_new_tokens`` behind them (``prompts.new_tokens_that_fit``). The same on all
                ranks.
            settings: the same on all ranks.
            first_prompt: index that the first one goes by, in results and for random numbers.
            listen: told of every piece of text as soon as it is final, on the first rank of a
                tensor-parallel group, of the sequences of its own batches.
            interrupted: asked after every token, on the same ranks, whether to end all texts where
                they are.

        Returns:
            The same on all ranks.

        Raises:
            InputError: settings without a meaning, a prompt that does not fit, or logits that are
                not finite; the same on all ranks.
        """
        check_generation(settings)
        self._check_lengths(prompts, settings.max_new_tokens)
        beginnings = [
            Beginning(first_prompt + index, sample, tuple(ids))
            for index, ids in enumerate(prompts)
            for sample in range(settings.num_samples)
        ]
        batches = batches_of(
            [len(one.ids) for one in beginnings], settings.batch_size, settings.max_new_tokens
        )
        replicas, replica = self._groups.layout.data, self._groups.data_rank
        own = [[beginnings[index] for index in batch] for batch in batches[replica::replicas]]
        try:
            found = [self._generate(batch, settings, listen, interrupted) for batch in own]
        except InputError as error:
            return _gathered(error)
        return _gathered(found)

    def _check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        # The last new token is not read.
        most = self._model.rotary_cosines.shape[0] + 1
        for index, ids in enumerate(prompts):
            if not 0 < len(ids) <= most - max_new_tokens:
                raise InputError(
                    f"--max-new-tokens {max_new_tokens}: prompt {index} has {len(ids)} tokens; "
                    f"from 1 to {most - max_new_tokens} leave room for the new ones"
                )

    def _generate(
        self,
        beginnings: Sequence[Beginning],
        settings: GenerationSettings,
        listen: Listener | None,
        interrupted: Interrupted | None,
    ) -> "_Part":
        """One batch."""
        chooser = None
        if self._groups.tensor_rank == 0:
            chooser = Chooser(beginnings, settings, self._tokenizer, device(), listen, interrupted)
        lengths = [len(one.ids) for one in beginnings]
        at_once = min(lengths)
        decoder = Decoder(self._model, len(beginnings), max(lengths) + settings.max_new_tokens - 1)
        tokens: Tensor | None = _tensor([one.ids[:at_once] for one in beginnings])
        times = [time.perf_counter()]
        while tokens is not None:
            logits = decoder.next_logits(tokens)
            tokens = self._next_tokens(chooser, logits, decoder.cache.length)
            times.append(time.perf_counter())
        continuations = chooser.continuations if chooser is not None else []
        return _Part(
            continuations,
            Pace(at_once * len(beginnings), times[1] - times[0]),
            Pace(sum(max(0, len(one.ids) - 1) for one in continuations), times[-1] - times[1]),
        )

    def _next_tokens(self, chooser: Chooser | None, logits: Tensor, length: int) -> Tensor | None:
        """What the group's first rank chooses, [b, 1], on all of its ranks; None at the end.

        Raises:
            InputError: the first rank cannot choose.
        """
        error, told = None, [_END] + [0] * logits.shape[0]
        if chooser is not None:
            try:
                tokens = chooser.next_tokens(logits, length)
                told = told if tokens is None else [_GO_ON, *tokens]
            except InputError as caught:
                error, told[0] = caught, _FAIL
        agreed = _tensor(told)
        group = self._groups.collection.tp
        if group.size() > 1:
            distributed.broadcast(agreed, distributed.get_global_rank(group, 0), group=group)
        what = agreed[0].item()
        if what == _FAIL:
            raise error or InputError("the first rank of the tensor-parallel group failed")
        return agreed[1:].unsqueeze(1) if what == _GO_ON else None


@dataclass(frozen=True)
class _Part:
    """What came out of one batch; no continuations on ranks that do not choose."""

    continuations: Sequence[Continuation]
    prefill: Pace
    decode: Pace


def _tensor(numbers: Sequence) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long, device=device())


def _gathered(own: list[_Part] | InputError) -> Generation:
    """Everything, from all ranks. Collective.

    Raises:
        InputError: that of the first rank that has one.
    """
    everyone: list[list[_Part] | InputError] = [[]] * distributed.get_world_size()
    distributed.all_gather_object(everyone, own)
    for found in everyone:
        if isinstance(found, InputError):
            raise found
    # Of a group, the first rank's alone: the others did the same in the same time.
    of_groups = [[part for part in parts if part.continuations] for parts in everyone]
    continuations = [one for part in chain(*of_groups) for one in part.continuations]
    return Generation(
        tuple(sorted(continuations, key=lambda one: (one.prompt, one.sample))),
        _side_by_side([[part.prefill for part in parts] for parts in of_groups]),
        _side_by_side([[part.decode for part in parts] for parts in of_groups]),
    )


def _side_by_side(groups: Sequence[Sequence[Pace]]) -> Pace:
    """Of groups that compute at the same time, each one batch after the other."""
    return Pace(
        sum(pace.tokens for paces in groups for pace in paces),
        max(sum(pace.seconds for pace in paces) for paces in groups),
    )
