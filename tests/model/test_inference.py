"""Logits token by token against those of the whole sequence, on any tensor parallelism."""

import pytest
import torch
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from megatron_attnres.depth_attention import module as depth_module
from megatron_attnres.model.inference import Decoder
from megatron_attnres.parallel.layout import ParallelLayout
from tests.distributed import restart_job, run_ranks
from tests.layouts import Case, build, small_model

LENGTH = 8
MODELS = {
    "baseline": {"mode": "baseline"},
    "block of 1": {"block_size": 1},
    "blocks of 3": {"block_size": 3},
    "one block": {"block_size": 8},
    "full": {"mode": "full"},
    "cumulative, biased": {"block_size": 3, "sources": "cumulative", "recency_bias": 0.4},
}
PIECES = {
    "prompt, then tokens": (5, 1, 1, 1),
    "prompt in two pieces": (3, 4, 1),
    "tokens": (1,) * LENGTH,
    "all at once": (LENGTH,),
}
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(tensor=2),
    ParallelLayout(tensor=2, sequence_parallel=True),
]


def whole_logits(chunk, tokens):
    """Of every position, [s, b, vocabulary], by the path that training takes."""
    with torch.no_grad():
        rotary = (chunk.rotary_cosines, chunk.rotary_sines)
        logits = chunk.logits_of(chunk.layers(chunk._embed(tokens), rotary))
        return gather_from_tensor_model_parallel_region(logits, group=chunk.groups.tp)


def largest_errors(options, layout, batch_size):
    """By pieces, the largest difference of any logit; runs on every rank."""
    case = Case(small_model(**options, seq_length=LENGTH), layout)
    _, step = build(case, torch.float64)
    chunk = step.chunks[0].module
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, case.model.vocab_size, (batch_size, LENGTH), generator=generator)
    expected = whole_logits(chunk, tokens)
    errors = {}
    for name, pieces in PIECES.items():
        decoder, start = Decoder(chunk, batch_size, max_length=LENGTH), 0
        differences = []
        for length in pieces:
            found = decoder.next_logits(tokens[:, start : start + length])
            start += length
            assert found.shape == (batch_size, case.model.vocab_size)
            assert found.dtype == torch.float32
            differences.append((found - expected[start - 1]).abs().max().item())
        assert decoder.cache.length == LENGTH
        errors[name] = max(differences)
    # Sequence parallelism is on again after tokens that ran without it.
    assert torch.equal(whole_logits(chunk, tokens), expected)
    return errors


def errors_of_every_model(layout):
    """A token alone (batch 1) is read by other code than a batch of them."""
    found = {}
    for name, options in MODELS.items():
        for batch_size in (1, 2):
            restart_job()
            found[name, batch_size] = largest_errors(options, layout, batch_size)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one rank", "tensor", "sequence"])
def test_piece_by_piece_gives_the_logits_of_the_whole_sequence(layout):
    ranks = run_ranks(errors_of_every_model, layout.world_size, layout)
    for found in ranks:
        for model, errors in found.items():
            for pieces, error in errors.items():
                # The result is rounded to float32.
                assert error < 2e-6, (model, pieces)


def tokens_read_by_phase_one(layout, length):
    """Sizes of the summaries that phase 1 was given while a prompt ran."""
    _, step = build(Case(small_model(seq_length=LENGTH), layout), torch.float32)
    seen = []
    attend = depth_module.attend_to_summaries

    def note(summaries, *operands):
        seen.append(summaries[0].shape[0])
        return attend(summaries, *operands)

    depth_module.attend_to_summaries = note
    try:
        decoder = Decoder(step.chunks[0].module, batch_size=2, max_length=LENGTH)
        decoder.next_logits(torch.zeros(2, length, dtype=torch.long))
        prompt = set(seen[:-1])
        seen.clear()
        decoder.next_logits(torch.zeros(2, 1, dtype=torch.long))
    finally:
        depth_module.attend_to_summaries = attend
    return prompt, set(seen)


@pytest.mark.parametrize("length", [5, 6])
def test_a_prompt_is_sharded_along_the_sequence(length):
    layout = ParallelLayout(tensor=2, sequence_parallel=True)
    for prompt, token in run_ranks(tokens_read_by_phase_one, 2, layout, length):
        assert prompt == {3}
        assert token == {1}


def refusals():
    """What a decoder says of a model or of tokens that it cannot take."""
    _, step = build(Case(small_model(seq_length=LENGTH), ParallelLayout()), torch.float32)
    chunk, messages = step.chunks[0].module, []
    for action in (
        lambda: Decoder(chunk, 1, LENGTH + 1),
        lambda: Decoder(chunk, 1, 2).next_logits(torch.zeros(1, 3, dtype=torch.long)),
    ):
        with pytest.raises(ValueError) as caught:
            action()
        messages.append(str(caught.value))
    chunk.is_last = False
    with pytest.raises(ValueError) as caught:
        Decoder(chunk, 1, 2)
    return [*messages, str(caught.value)]


def test_what_cannot_be_done_is_said():
    too_long, no_room, part = run_ranks(refusals, 1)[0]
    assert "max_length 9 exceeds the 8 positions" in too_long
    assert "make it with max_length 3 or more" in no_room
    assert "whole model in one pipeline stage" in part
