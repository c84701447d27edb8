"""What rank 0 measures of one model, whoever computes its scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_attnres.data.tokenizers import Tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.comparison.settings import CorpusRequest
from megatron_attnres.evaluation.generation.settings import GenerationSettings
from megatron_attnres.evaluation.perplexity.documents import documents_of
from megatron_attnres.evaluation.perplexity.meter import Meter
from megatron_attnres.evaluation.perplexity.perplexity import Perplexity, measure_perplexity
from megatron_attnres.evaluation.scoring.windows import Scores, Window
from megatron_attnres.evaluation.tasks.harness import TaskFigure, evaluate_tasks
from megatron_attnres.evaluation.tasks.harness_generation import settings_of, text_requests
from megatron_attnres.evaluation.tasks.harness_tasks import LoadedTasks

Ask = Callable[[Any], Any]


@dataclass(frozen=True)
class MeasuredModel:
    """A model that answers.

    Attributes:
        name: for progress bars.
        tokenizer: of its ids.
        context, stride: of windows, in tokens.
        batch_size: texts that are generated together.
        ask: has all ranks answer a request.
        meter: of what they compute.
    """

    name: str
    tokenizer: Tokenizer
    context: int
    stride: int
    batch_size: int
    ask: Ask
    meter: Meter

    def perplexity(self, corpus: CorpusRequest) -> Perplexity:
        """Of a corpus.

        Raises:
            InputError: it cannot be read, or holds nothing.
        """
        with self.meter.bar(f"{self.name}: perplexity"):
            return measure_perplexity(
                documents_of(corpus, self.tokenizer),
                self._score,
                self.tokenizer.eod,
                self.context,
                self.stride,
            )

    def figures(self, tasks: LoadedTasks) -> list[TaskFigure]:
        """Of tasks.

        Raises:
            InputError: a task asks for text in a way that the generator or the model's context
                cannot give.
        """
        # Loaded on use: it imports the harness.
        from megatron_attnres.evaluation.tasks.harness_model import HarnessModel

        for name in tasks.generating():
            try:
                self._settings_of(tasks.tasks[name].config.generation_kwargs)
            except InputError as error:
                raise InputError(f"--tasks {name}: {error}") from error
        model = HarnessModel(self.tokenizer, self.context, self._score_request, self._generate)
        return evaluate_tasks(tasks, model)

    def _score(self, windows: Sequence[Window]) -> list[Scores]:
        with self.meter.running():
            return self.ask(windows)

    def _score_request(self, windows: Sequence[Window]) -> list[Scores]:
        positions = sum(window.length for window in windows)
        with self.meter.bar(f"{self.name}: tasks", positions):
            return self._score(windows)

    def _generate(self, contexts: Sequence[str], options: dict[str, Any]) -> list[str]:
        texts: list[str] = []
        with self.meter.bar(f"{self.name}: tasks, generating"):
            for request in text_requests(
                contexts, self._settings_of(options), self.tokenizer, self.context
            ):
                with self.meter.running():
                    generation = self.ask(request)
                self.meter.advance(generation.prefill.tokens + generation.decode.tokens)
                texts += [one.text for one in generation.continuations]
        return texts

    def _settings_of(self, options: dict[str, Any]) -> GenerationSettings:
        return settings_of(options, self.context, self.batch_size)
