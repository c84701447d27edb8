"""Trained runs, evaluated one after the other in one job."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.comparison.measuring import Ask, MeasuredModel
from megatron_attnres.evaluation.comparison.results import RunResult
from megatron_attnres.evaluation.comparison.settings import EvaluationSettings
from megatron_attnres.evaluation.generation.generator import Generator
from megatron_attnres.evaluation.job import Helpers, build_trained, joined
from megatron_attnres.evaluation.perplexity.meter import Meter
from megatron_attnres.evaluation.scoring.chunk import ScoringChunk
from megatron_attnres.evaluation.scoring.scorer import Scorer
from megatron_attnres.evaluation.scoring.windows import Window
from megatron_attnres.evaluation.tasks.harness_generation import TextRequest
from megatron_attnres.evaluation.tasks.harness_tasks import LoadedTasks, load_tasks
from megatron_attnres.parallel.agreement import same_error_on_all_ranks
from megatron_attnres.parallel.groups import ParallelGroups
from megatron_attnres.training.checkpoints.stored_model import StoredModel

Answer = TypeVar("Answer")


def evaluate_runs(
    runs: Sequence[StoredModel], settings: EvaluationSettings
) -> list[RunResult] | None:
    """Evaluate runs on the ranks of the job. Every rank calls it.

    Returns:
        Results in the order of the runs on rank 0; None on the others.

    Raises:
        InputError: a checkpoint, tokenizer, corpus or task cannot be used; the same on all ranks.
    """
    with joined(settings.job) as groups:
        return evaluate_with(groups, runs, settings)


def evaluate_with(
    groups: ParallelGroups, runs: Sequence[StoredModel], settings: EvaluationSettings
) -> list[RunResult] | None:
    """As ``evaluate_runs``, in a job that has been joined."""
    evaluation = _Evaluation(settings, groups)
    results = [evaluation.of(stored) for stored in runs]
    return None if None in results else results


class _Evaluation:
    """What the runs of one job have in common; tasks are loaded before any model is built."""

    def __init__(self, settings: EvaluationSettings, groups: ParallelGroups) -> None:
        self._settings = settings
        self._groups = groups
        self._scorer: Scorer | None = None
        self._generator: Generator | None = None
        self._helpers = Helpers(self._answer)
        self._tasks = self._led(lambda ask: self._load_tasks())

    def of(self, stored: StoredModel) -> RunResult | None:
        """Evaluate one run. Collective."""
        settings = self._settings
        with same_error_on_all_ranks():
            tokenizer = stored.open_tokenizer(settings.tokenizer)
        # The last run's model makes room before this one's comes.
        self._scorer = self._generator = None
        meter = Meter()
        step = build_trained(stored, self._groups, settings.job.precision, ScoringChunk)
        self._scorer = Scorer(
            step, self._groups, tokenizer.vocab_size, settings.batch_size, meter.advance
        )
        if self._groups.layout.pipeline == 1:
            self._generator = Generator(step.chunks[0].module, self._groups, tokenizer)
        return self._led(
            lambda ask: self._measured(
                stored,
                MeasuredModel(
                    stored.given,
                    tokenizer,
                    settings.context_of(stored),
                    settings.stride_of(stored),
                    settings.batch_size,
                    ask,
                    meter,
                ),
            )
        )

    def _led(self, lead: Callable[[Ask], Answer]) -> Answer | None:
        """Rank 0 leads; input that it cannot use ends all ranks."""
        with same_error_on_all_ranks():
            return self._helpers.led(lambda ask: lead(_raising(ask)))

    def _answer(self, request: Sequence[Window] | TextRequest) -> Any:
        """On every rank: scores of windows, or generated text, or why there is none."""
        if not isinstance(request, TextRequest):
            return self._scorer.score(request)
        try:
            return self._generator.generate(request.prompts, request.settings, request.first_prompt)
        except InputError as error:
            # It is that of all ranks. Rank 0 raises it; the others wait for what it does then.
            return error

    def _load_tasks(self) -> LoadedTasks | None:
        if self._settings.tasks is None:
            return None
        tasks = load_tasks(self._settings.tasks)
        tasks.check_stages(self._groups.layout.pipeline)
        return tasks

    def _measured(self, stored: StoredModel, model: MeasuredModel) -> RunResult:
        corpus = self._settings.corpus
        perplexity = model.perplexity(corpus) if corpus is not None else None
        figures = model.figures(self._tasks) if self._tasks is not None else []
        return RunResult(
            run=stored.given,
            checkpoint=str(stored.folder),
            model=stored.model,
            iteration=stored.iteration,
            trained_tokens=stored.tokens,
            precision=self._settings.job.precision or stored.precision,
            context=model.context,
            stride=model.stride,
            perplexity=perplexity,
            tasks=figures,
            positions=model.meter.tokens,
            seconds=model.meter.seconds,
        )


def _raising(ask: Ask) -> Ask:
    """Raises an answer that is an error."""

    def asked(request: Any) -> Any:
        answer = ask(request)
        if isinstance(answer, InputError):
            raise answer
        return answer

    return asked
