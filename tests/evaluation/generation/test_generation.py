"""Generated tokens against whole forward passes, on every mode and tensor parallelism."""

import io
import os
import sys
from dataclasses import replace

import pytest
import torch
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import distributed

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.tokenizers import load_tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.generation import generator as generation_module
from megatron_attnres.evaluation.generation.batches import batches_of
from megatron_attnres.evaluation.generation.conversation import Conversation
from megatron_attnres.evaluation.generation.generator import Generator
from megatron_attnres.evaluation.generation.settings import (
    GenerationSettings,
    Pace,
    SamplingSettings,
)
from megatron_attnres.model.inference import Decoder
from megatron_attnres.parallel.layout import ParallelLayout
from tests.distributed import restart_job, run_ranks
from tests.layouts import Case, build, small_model

CONTEXT = 24
MODELS = {
    "baseline": {"mode": "baseline"},
    "block": {"block_size": 3},
    "full": {"mode": "full"},
    "cumulative, biased": {"block_size": 3, "sources": "cumulative", "recency_bias": 0.4},
}
ONE, TENSOR = ParallelLayout(), ParallelLayout(tensor=2)
SEQUENCE = ParallelLayout(tensor=2, sequence_parallel=True)
REPLICAS = ParallelLayout(data=2)
# 61 ids; the models' vocabulary is padded to 64.
TOKENIZER = TokenizerConfig("NullTokenizer", vocab_size=60)
EOD = 60
# Of unlike lengths, so that longer ones are used up while shorter ones go on already.
PROMPTS = [[EOD, 3, 14, 15, 9], [EOD], [7, 1, 8, 2, 8, 1, 8, 2, 8], [EOD, 50, 6], [EOD, 50]]
GREEDY = GenerationSettings(max_new_tokens=12, ignore_end=True)
DRAWN = replace(GREEDY, sampling=SamplingSettings(1.3, seed=4), num_samples=3, batch_size=4)


def open_generator(options, layout):
    """On the ranks of the current job, which belongs to it."""
    restart_job()
    case = Case(small_model(**options, seq_length=CONTEXT), layout)
    groups, step = build(case, torch.float32)
    return Generator(step.chunks[0].module, groups, load_tokenizer(TOKENIZER))


class NotingDecoder(Decoder):
    """Keeps the logits that it gives, by the positions before them."""

    seen: list  # of this test's decoders

    def next_logits(self, tokens):
        logits = super().next_logits(tokens)
        self.seen.append((self.cache.length, logits))
        return logits


def whole_logits(model, ids):
    """Of every position of one sequence, [s, vocabulary], by the path that training takes."""
    padding = -len(ids) % model.groups.tp.size()
    with torch.no_grad():
        rotary = (model.rotary_cosines, model.rotary_sines)
        tokens = torch.tensor([[*ids, *[0] * padding]])
        logits = model.logits_of(model.layers(model._embed(tokens), rotary))
        return gather_from_tensor_model_parallel_region(logits, group=model.groups.tp)[:, 0]


def largest_error(generator, prompts, settings):
    """Of any logit that a token was chosen from, beside the largest of them; and what came."""
    NotingDecoder.seen = []
    generation_module.Decoder = NotingDecoder
    try:
        found = generator.generate(prompts, settings)
    finally:
        generation_module.Decoder = Decoder
    errors = []
    for row, one in enumerate(found.continuations):
        whole = whole_logits(generator._model, [*prompts[one.prompt], *one.ids[:-1]])
        for length, logits in NotingDecoder.seen:
            if length <= len(prompts[one.prompt]) + len(one.ids) - 1:
                difference = logits[row] - whole[length - 1]
                errors.append((difference.abs().max() / whole.abs().max()).item())
    return max(errors), found


def errors_of_every_mode(layout):
    """Alone, and in a ragged batch whose rows lie in the order of the prompts."""
    by_length = sorted(PROMPTS, key=lambda ids: -len(ids))
    found = {}
    for name, options in MODELS.items():
        generator = open_generator(options, layout)
        for what, prompts in (("one", PROMPTS[:1]), ("ragged batch", by_length)):
            found[name, what] = largest_error(generator, prompts, GREEDY)
    return found


@pytest.mark.parametrize("layout", [ONE, TENSOR, SEQUENCE], ids=["one rank", "tensor", "sequence"])
def test_tokens_are_chosen_from_the_whole_sequences_logits(layout):
    first, *others = run_ranks(errors_of_every_mode, layout.world_size, layout)
    for case, (error, generation) in first.items():
        assert error < 1e-5, case
        assert all(len(one.ids) == 12 for one in generation.continuations)
        for other in others:
            assert other[case][1] == generation


def texts_alone_and_together(options):
    generator = open_generator(options, ONE)
    found = {}
    for name, settings in (("greedy", GREEDY), ("drawn", DRAWN)):
        alone = [
            one
            for index, prompt in enumerate(PROMPTS)
            for one in generator.generate(
                [prompt], replace(settings, batch_size=1), first_prompt=index
            ).continuations
        ]
        found[name] = [tuple(alone)] + [
            generator.generate(PROMPTS, replace(settings, batch_size=size)).continuations
            for size in (2, 5, 64)
        ]
    return found


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_a_text_does_not_depend_on_the_batch(options):
    for together in run_ranks(texts_alone_and_together, 1, options)[0].values():
        alone = together[0]
        assert all(len(one.ids) == 12 for one in alone)
        assert all(other == alone for other in together)


def texts_on(layouts):
    found = []
    for layout in layouts:
        generator = open_generator(MODELS["block"], layout)
        found.append([generator.generate(PROMPTS, one).continuations for one in (GREEDY, DRAWN)])
    return found


def test_every_layout_gives_the_same_texts_on_every_rank():
    (expected,) = run_ranks(texts_on, 1, [ONE])[0]
    for found in run_ranks(texts_on, 2, [TENSOR, SEQUENCE, REPLICAS]):
        assert found == [expected] * 3
    for found in run_ranks(texts_on, 4, [ParallelLayout(tensor=2, data=2)]):
        assert found == [expected]


def texts_with_ends():
    """Of one model, by settings; and what a listener was told."""
    generator = open_generator(MODELS["block"], ONE)
    endless = replace(DRAWN, num_samples=8)
    told = []
    found = {"endless": generator.generate(PROMPTS, endless)}
    found["ended"] = generator.generate(
        PROMPTS, replace(endless, ignore_end=False), listen=lambda *piece: told.append(piece)
    )
    first = found["endless"].continuations[0].text
    stop = first[4:8]
    found["stopped"] = generator.generate(PROMPTS, replace(endless, stops=(stop, "never")))
    countdown = iter(range(3, -1, -1))
    found["interrupted"] = generator.generate(
        PROMPTS, replace(endless, batch_size=64), interrupted=lambda: next(countdown) == 0
    )
    return found, told, stop


@pytest.fixture(scope="module")
def ends():
    return run_ranks(texts_with_ends, 1)[0]


def test_no_padded_id_is_ever_chosen(ends):
    ids = {id_ for one in ends[0]["endless"].continuations for id_ in one.ids}
    assert max(ids) <= EOD


def test_a_text_ends_at_the_end_of_its_document(ends):
    reasons = set()
    pairs = zip(ends[0]["endless"].continuations, ends[0]["ended"].continuations, strict=True)
    for endless, ended in pairs:
        assert endless.ids[: len(ended.ids)] == ended.ids
        assert EOD not in ended.ids[:-1]
        assert ended.ended_by == ("end of text" if ended.ids[-1] == EOD else "length")
        without_end = [id_ for id_ in ended.ids if id_ != EOD]
        assert ended.text.split() == [str(id_) for id_ in without_end]
        reasons.add(ended.ended_by)
    assert reasons == {"end of text", "length"}


def test_pieces_make_the_texts(ends):
    found, told, _ = ends
    for one in found["ended"].continuations:
        pieces = [
            piece for prompt, sample, piece in told if (prompt, sample) == (one.prompt, one.sample)
        ]
        assert "".join(pieces) == one.text
        assert len(pieces) == len(one.text.split())


def test_a_text_ends_before_a_stop(ends):
    found, _, stop = ends
    pairs = zip(found["endless"].continuations, found["stopped"].continuations, strict=True)
    cut = 0
    for endless, stopped in pairs:
        assert stopped.text == endless.text.split(stop)[0]
        assert stopped.ended_by == ("stop text" if stop in endless.text else "length")
        assert endless.ids[: len(stopped.ids)] == stopped.ids
        cut += len(stopped.ids) < len(endless.ids)
    assert cut


def test_interrupted_texts_end_where_they_are(ends):
    found = ends[0]["interrupted"].continuations
    # The longest prompt was not used up after four tokens of the shortest one's text.
    assert {len(one.ids) for one in found} == {0, 2, 3, 4}
    assert {one.ended_by for one in found} == {"interrupted"}


def test_what_is_counted(ends):
    endless = ends[0]["endless"]
    assert endless.decode.tokens == len(PROMPTS) * 8 * 11
    assert endless.prefill.tokens <= 8 * sum(map(len, PROMPTS))
    assert endless.prefill.seconds > 0
    assert endless.decode.tokens_per_second == endless.decode.tokens / endless.decode.seconds
    assert Pace(0, 0.0).tokens_per_second is None


def refusals():
    generator = open_generator(MODELS["block"], TENSOR)
    messages = []
    too_long = [[1] * (CONTEXT - 10)]
    for prompts, settings in (
        (too_long, GREEDY),
        ([[]], GREEDY),
        (PROMPTS, replace(GREEDY, stops=("",))),
        (PROMPTS, replace(GREEDY, num_samples=0)),
    ):
        with pytest.raises(InputError) as caught:
            generator.generate(prompts, settings)
        messages.append(str(caught.value))
    fitting = generator.generate([[1] * (CONTEXT - 11)], GREEDY).continuations[0]
    next(generator._model.parameters()).data.fill_(torch.nan)
    with pytest.raises(InputError) as caught:
        generator.generate(PROMPTS, GREEDY)
    return [*messages, str(caught.value), len(fitting.ids)]


def test_what_cannot_be_done_is_said_on_every_rank():
    first, second = run_ranks(refusals, 2)
    assert first == second
    too_long, empty, no_stop, no_samples, not_finite, fitting = first
    assert "prompt 0 has 14 tokens" in too_long
    assert "prompt 0 has 0 tokens" in empty
    assert "--stop ''" in no_stop
    assert "--num-samples 0" in no_samples
    assert "not finite" in not_finite
    assert fitting == 12


def typed(lines):
    """Standard input that somebody closed after these lines: a real file descriptor."""
    reading, writing = os.pipe()
    os.write(writing, lines.encode())
    os.close(writing)
    return os.fdopen(reading, encoding="utf-8")


def conversation(lines, damaged):
    """What was said on a rank: texts, pieces, errors."""
    generator = open_generator(MODELS["block"], TENSOR)
    tokenizer = generator._tokenizer
    if damaged:
        next(generator._model.parameters()).data.fill_(torch.nan)
    if distributed.get_rank() == 0:
        sys.stdin = typed(lines)
    sys.stderr = io.StringIO()
    texts, pieces, error = [], [], ""
    talk = Conversation(
        generator,
        lambda line: (tokenizer.tokenize(line), DRAWN),
        lambda generation: texts.append(generation.continuations),
        lambda prompt, sample, piece: pieces.append((prompt, sample, piece)),
    )
    try:
        talk.run()
    except InputError as caught:
        error = str(caught)
    alone = [] if damaged else [generator.generate([[7]], DRAWN).continuations]
    return texts, pieces, sys.stderr.getvalue(), error, alone


def test_every_line_is_a_prompt_of_its_own():
    first, second = run_ranks(conversation, 2, "7\n\n  \nword\n7\n5 1", False)
    texts, pieces, errors, error, alone = first
    assert [text[0].prompt for text in texts] == [0, 1, 2]
    assert texts[0] == alone[0]
    # The same line again is given other random numbers.
    assert texts[0][0].ids != texts[1][0].ids
    for one in (one for text in texts for one in text):
        own = [
            piece
            for prompt, sample, piece in pieces
            if (prompt, sample) == (one.prompt, one.sample)
        ]
        assert "".join(own) == one.text
    assert "holds 'word'" in errors
    assert errors.count("\n") == 1
    assert error == ""
    assert second[:4] == ([], [], "", "")


def test_a_model_that_cannot_answer_ends_all_ranks():
    for texts, _, errors, error, _ in run_ranks(conversation, 2, "7\n7\n", True):
        assert texts == []
        assert errors == ""
        assert "not finite" in error


def test_sequences_of_like_lengths_go_together():
    assert batches_of([3, 9, 3, 4], 8, 100) == [(1, 3, 0, 2)]
    assert batches_of([3, 9, 3, 4], 2, 100) == [(1, 3), (0, 2)]
    assert batches_of([3, 9, 3, 4], 8, 5) == [(1, 3), (0, 2)]
    assert batches_of([3, 9, 3, 4], 8, 0) == [(1,), (3,), (0, 2)]
    assert batches_of([], 8, 0) == []
