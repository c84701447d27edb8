"""The harness' figures are those that the model's own logits give by hand."""

import json
import math
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

from megatron_attnres.data.tokenizers import Tokenizer, load_tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.comparison.measuring import MeasuredModel
from megatron_attnres.evaluation.comparison.settings import CorpusRequest
from megatron_attnres.evaluation.flags import JobFlags
from megatron_attnres.evaluation.generation.generator import Generator
from megatron_attnres.evaluation.job import build_trained, joined
from megatron_attnres.evaluation.perplexity.documents import count_words
from megatron_attnres.evaluation.perplexity.meter import Meter
from megatron_attnres.evaluation.scoring.chunk import ScoringChunk
from megatron_attnres.evaluation.scoring.scorer import Scorer
from megatron_attnres.evaluation.tasks.harness_generation import TextRequest, settings_of
from megatron_attnres.evaluation.tasks.harness_model import HarnessModel
from megatron_attnres.evaluation.tasks.harness_tasks import load_tasks
from megatron_attnres.evaluation.tasks.request import TaskRequest
from megatron_attnres.model.gpt import GPTChunk
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.checkpoints.stored_model import find_stored_model
from tests.evaluation.checkpoints import make_checkpoint
from tests.evaluation.scored_models import whole_logits
from tests.evaluation.text import (
    HELLASWAG,
    LAMBADA,
    WIKITEXT,
    generating_task,
    make_tokenizer,
    records_of,
)
from tests.layouts import small_model

CONTEXT = 64
DATA = {"wikitext": WIKITEXT, "lambada_openai": LAMBADA, "hellaswag": HELLASWAG}
CLOSE = {"rel": 1e-6}


@dataclass
class Opened:
    """A trained model on this process, twice.

    Attributes:
        plain: the whole model, knowing nothing of scoring.
        measured: what is tested.
        tokenizer: of both.
    """

    plain: GPTChunk
    measured: MeasuredModel
    tokenizer: Tokenizer

    def log_probability(self, tokens: list[int], scored: int) -> tuple[float, bool]:
        """Of the last tokens, after as many as the context holds before them."""
        tokens = tokens[-(CONTEXT + 1) :]
        logits = whole_logits(self.plain, tokens[:-1])[-scored:]
        labels = torch.tensor(tokens[-scored:])
        chosen = logits.log_softmax(-1).gather(1, labels[:, None])
        real = logits[:, : self.tokenizer.vocab_size]
        return chosen.sum().item(), bool((real.argmax(-1) == labels).all())

    def continued(self, context: str, continuation: str) -> tuple[float, bool]:
        """Of a continuation whose first token begins where the context's last one ends."""
        whole = self.tokenizer.tokenize(context + continuation)
        seen = len(self.tokenizer.tokenize(context))
        return self.log_probability(whole, len(whole) - seen)

    def greedy_text(self, context: str, most: int, stop: str) -> str:
        """What follows a context, the likeliest token each time, up to the stop."""
        tokens = self.tokenizer.tokenize(context)[-(CONTEXT + 1 - most) :]
        new: list[int] = []
        for _ in range(most):
            logits = whole_logits(self.plain, [*tokens, *new])[-1, : self.tokenizer.vocab_size]
            if int(logits.argmax()) == self.tokenizer.eod:
                break
            new.append(int(logits.argmax()))
        return self.tokenizer.detokenize(new).split(stop)[0]

    def harness_model(self) -> HarnessModel:
        return HarnessModel(self.tokenizer, CONTEXT, self.measured.ask, None)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = make_tokenizer(folder)
    model = replace(small_model(seq_length=CONTEXT), vocab_size=512)
    stored = find_stored_model(str(make_checkpoint(folder / "run", model, config)))
    tokenizer = load_tokenizer(config)
    with joined(JobFlags(ParallelLayout(), None, None, timedelta(minutes=1))) as groups:
        step = build_trained(stored, groups, chunk_type=ScoringChunk)
        meter = Meter()
        scorer = Scorer(step, groups, tokenizer.vocab_size, 4, meter.advance)
        generator = Generator(step.chunks[0].module, groups, tokenizer)

        def ask(request):
            if isinstance(request, TextRequest):
                return generator.generate(request.prompts, request.settings, request.first_prompt)
            return scorer.score(request)

        measured = MeasuredModel("run", tokenizer, CONTEXT, CONTEXT, 4, ask, meter)
        plain = build_trained(stored, groups).chunks[0].module
        yield Opened(plain, measured, tokenizer)


@dataclass
class Evaluated:
    """What the harness found.

    Attributes:
        values: by task and metric.
        figures: as they are.
        tasks: the harness' own, with the answers it got.
    """

    values: dict[tuple[str, str], float]
    figures: list
    tasks: dict[str, Any]


def evaluated(opened, *names, **options):
    request = TaskRequest(names, {name: DATA[name] for name in names}, **options)
    loaded = load_tasks(request)
    figures = opened.measured.figures(loaded)
    values = {(one.task, one.metric): one.value for one in figures}
    return Evaluated(values, figures, loaded.tasks)


@pytest.fixture(scope="module")
def all_tasks(opened):
    return evaluated(opened, *DATA)


def test_wikitext_is_the_perplexity_of_its_pages(opened, all_tasks, tmp_path):
    pages = [record["page"] for record in records_of(WIKITEXT)]
    # The harness scores the detokenised page, and counts the words and bytes of the page as it is.
    for number, page in enumerate(pages):
        (tmp_path / f"{number}.txt").write_text(wikitext_detokenizer({"page": page}))
    found = opened.measured.perplexity(CorpusRequest(text=(str(tmp_path),)))
    assert found.documents == len(pages)
    words, size = sum(map(count_words, pages)), sum(len(page.encode()) for page in pages)
    expected = replace(found, words=words, bytes=size).figures
    assert found.nats / words > 1
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        assert all_tasks.values["wikitext", metric] == pytest.approx(expected[metric], **CLOSE)


def test_perplexity_is_the_sum_over_the_models_own_logits(opened):
    page = records_of(WIKITEXT)[0]["page"]
    tokens = [opened.tokenizer.eod, *opened.tokenizer.tokenize(page)]
    total = 0.0
    done = 0
    while done < len(tokens) - 1:
        end = min(len(tokens) - 1, max(CONTEXT, done + CONTEXT))
        total += opened.log_probability(tokens[: end + 1], end - done)[0]
        done = end
    (request,) = [Instance("loglikelihood_rolling", {}, (page,), 0)]
    (found,) = opened.harness_model().loglikelihood_rolling([request])
    assert len(tokens) > 2 * CONTEXT
    assert found == pytest.approx(total, **CLOSE)


def test_hellaswag_chooses_by_the_models_own_logits(opened, all_tasks):
    task = all_tasks.tasks["hellaswag"]
    right = right_by_length = 0
    for number, doc in enumerate(task.eval_docs):
        asked = [one for one in task.instances if one.doc_id == number]
        wanted = [opened.continued(doc["query"], f" {choice}") for choice in doc["choices"]]
        for instance, (log_probability, greedy) in zip(asked, wanted, strict=True):
            ((found, found_greedy),) = instance.resps
            assert found == pytest.approx(log_probability, **CLOSE)
            assert found_greedy == greedy
        scores = [log_probability for log_probability, _ in wanted]
        by_length = [
            score / len(choice) for score, choice in zip(scores, doc["choices"], strict=True)
        ]
        right += scores.index(max(scores)) == doc["gold"]
        right_by_length += by_length.index(max(by_length)) == doc["gold"]
    documents = len(records_of(HELLASWAG))
    assert all_tasks.values["hellaswag", "acc"] == right / documents
    assert all_tasks.values["hellaswag", "acc_norm"] == right_by_length / documents


def test_lambada_is_the_last_word_after_the_others(opened, all_tasks):
    found = []
    for record in records_of(LAMBADA):
        *before, last = record["text"].split(" ")
        found.append(opened.continued(" ".join(before), f" {last}"))
    perplexity = math.exp(-sum(one for one, _ in found) / len(found))
    assert all_tasks.values["lambada_openai", "perplexity"] == pytest.approx(perplexity, **CLOSE)
    accuracy = sum(greedy for _, greedy in found) / len(found)
    assert all_tasks.values["lambada_openai", "acc"] == accuracy


def test_figures_carry_what_they_are_of(all_tasks):
    by_name = {(one.task, one.metric): one for one in all_tasks.figures}
    choice = by_name["hellaswag", "acc"]
    assert (choice.documents, choice.num_fewshot, choice.higher_is_better) == (6, 0, True)
    assert choice.stderr is not None
    assert by_name["lambada_openai", "perplexity"].stderr > 0
    assert by_name["wikitext", "word_perplexity"].stderr is None
    assert by_name["wikitext", "word_perplexity"].higher_is_better is False


def test_examples_come_before_the_question_and_are_not_the_question(opened):
    found = evaluated(opened, "hellaswag", num_fewshot=5, limit=3)
    task = found.tasks["hellaswag"]
    assert {one.documents for one in found.figures} == {3}
    assert {one.num_fewshot for one in found.figures} == {5}
    queries = [doc["query"] for doc in task.eval_docs]
    for instance in task.instances:
        context = instance.args[0]
        assert context.endswith(queries[instance.doc_id])
        # All five others, and the question once.
        assert [context.count(query) for query in queries] == [1] * 6


def test_tasks_can_be_asked_of_one_model_after_the_other(opened):
    loaded = load_tasks(TaskRequest(("hellaswag",), {"hellaswag": HELLASWAG}, num_fewshot=1))
    assert opened.measured.figures(loaded) == opened.measured.figures(loaded)


def asked(context, continuation):
    return Instance("loglikelihood", {}, (context, continuation), 0)


def test_pairs_are_cut_and_joined_as_the_harness_does_it(opened):
    tokenizer = opened.tokenizer
    long = "the lamp and the key " * 30
    requests = [
        asked("the old man ", "rowed"),
        asked("", "rowed the boat"),
        asked(long, "boat"),
        asked("def f(x):", " return x + 1"),
    ]
    found = opened.harness_model().loglikelihood(requests)
    after_end = [tokenizer.eod, *tokenizer.tokenize("rowed the boat")]
    assert len(tokenizer.tokenize(long)) > CONTEXT
    wanted = [
        # The space goes to the continuation.
        opened.continued("the old man", " rowed"),
        opened.log_probability(after_end, len(after_end) - 1),
        # Trailing space of the context again, and tokens lost on the left.
        opened.continued(long.rstrip(), " boat"),
        opened.continued("def f(x):", " return x + 1"),
    ]
    for (total, greedy), (expected, expected_greedy) in zip(found, wanted, strict=True):
        assert total == pytest.approx(expected, **CLOSE)
        assert greedy == expected_greedy


def test_a_continuation_beyond_the_context_loses_none_of_its_tokens(opened):
    continuation = " the boat and the river" * 30
    whole = opened.tokenizer.tokenize("row" + continuation)
    seen = len(opened.tokenizer.tokenize("row"))
    scored = len(whole) - seen
    assert scored > 2 * CONTEXT
    total = 0.0
    done = seen - 1
    while done < len(whole) - 1:
        end = min(len(whole) - 1, max(CONTEXT, done + CONTEXT))
        total += opened.log_probability(whole[: end + 1], end - done)[0]
        done = end
    ((found, _),) = opened.harness_model().loglikelihood([asked("row", continuation)])
    assert found == pytest.approx(total, **CLOSE)


def test_the_likeliest_continuation_is_greedy(opened):
    tokens = opened.tokenizer.tokenize("the old man rowed the")
    logits = whole_logits(opened.plain, tokens)[-1, : opened.tokenizer.vocab_size]
    best = int(logits.argmax())
    request = (None, tokens, [best])
    other = (None, tokens, [(best + 1) % opened.tokenizer.vocab_size])
    answers = opened.harness_model()._loglikelihood_tokens([request, other, (None, tokens, [])])
    assert [greedy for _, greedy in answers] == [True, False, True]
    assert answers[2][0] == 0.0


def test_generated_text_is_the_models_likeliest(opened, tmp_path):
    contexts = ["def main(", "the old man rowed the boat " * 20, "import"]
    wanted = [opened.greedy_text(context, 12, "e") for context in contexts]
    assert len(set(wanted)) > 1
    records = [
        {"question": context, "answer": text if number else "no such text"}
        for number, (context, text) in enumerate(zip(contexts, wanted, strict=True))
    ]
    loaded = load_tasks(generating_task(tmp_path, records))
    (figure,) = opened.measured.figures(loaded)
    assert (figure.task, figure.metric, figure.documents) == ("generate", "exact_match", 3)
    assert figure.value == pytest.approx(2 / 3)
    assert [one.resps for one in loaded.tasks["generate"].instances] == [[one] for one in wanted]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_beams": 3}, "asks for generated text with num_beams 3"),
        ({"max_gen_toks": "many"}, "asks for generated text with max_gen_toks 'many'; a whole"),
        ({"max_gen_toks": 0}, "asks for generated text with max_gen_toks 0; a whole"),
        ({"until": [5]}, r"asks for generated text with until \[5\]; text or texts"),
        ({"max_gen_toks": CONTEXT}, f"generates up to {CONTEXT} tokens, which do not fit"),
    ],
)
def test_text_that_cannot_be_generated_is_refused(opened, tmp_path, options, complaint):
    request = generating_task(tmp_path, [{"question": "a", "answer": "b"}], **options)
    loaded = load_tasks(request)
    with pytest.raises(InputError, match=f"^--tasks generate: {complaint}"):
        opened.measured.figures(loaded)


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": False, "temperature": 1}, 0.0),
        ({"temperature": 0.0, "num_beams": 1}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.2}, 0.2),
    ],
)
def test_sampling_is_what_the_task_asks_for(options, temperature):
    settings = settings_of({"until": "\n", "top_p": 0.95, **options}, 1000, 4)
    assert settings.sampling.temperature == temperature
    assert settings.sampling.top_p == (0.95 if temperature else None)
    assert (settings.max_new_tokens, settings.stops) == (256, ("\n",))


@pytest.mark.parametrize(
    ("pages", "reason"), [([""], "ZeroDivisionError"), (["a b", 5], "AttributeError")]
)
def test_documents_that_the_harness_stumbles_over_are_named(opened, tmp_path, pages, reason):
    path = tmp_path / "pages.jsonl"
    path.write_text("".join(json.dumps({"page": page}) + "\n" for page in pages))
    loaded = load_tasks(TaskRequest(("wikitext",), {"wikitext": path}))
    with pytest.raises(InputError, match=f"^--tasks wikitext: .*{reason}"):
        opened.measured.figures(loaded)


def test_what_fails_in_the_model_is_no_bad_input(opened):
    loaded = load_tasks(TaskRequest(("wikitext",), {"wikitext": WIKITEXT}, limit=1))

    def failing(request):
        raise RuntimeError("of the model")

    with pytest.raises(RuntimeError, match="of the model"):
        replace(opened.measured, ask=failing).figures(loaded)


def test_nothing_of_the_harness_is_printed(opened, capfd):
    evaluated(opened, "lambada_openai")
    assert capfd.readouterr() == ("", "")
