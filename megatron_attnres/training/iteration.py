"""One iteration: forward, backward, finish gradients, update, measure."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megatron_attnres.data.batches import Batch
from megatron_attnres.optimizer.learning_rate import current_learning_rate
from megatron_attnres.optimizer.main_gradients import main_gradient
from megatron_attnres.optimizer.training_optimizer import TrainingOptimizer
from megatron_attnres.parallel.gradients import finish_gradients
from megatron_attnres.parallel.groups import ParallelGroups
from megatron_attnres.pipeline.step import PipelineStep, StepRecord
from megatron_attnres.training.batches import BatchSource
from megatron_attnres.training.checkpoints.description import TrainingState
from megatron_attnres.training.forward_step import forward_step
from megatron_attnres.training.metrics import (
    IterationMetrics,
    RankFigures,
    average,
    figures_of_all_ranks,
    mean_loss_of_batch,
    peak_memory,
)
from megatron_attnres.training.profiling import TrainingProfile
from megatron_attnres.training.run_config import RunConfig
from megatron_attnres.training.throughput import model_tflops_per_rank
from megatron_attnres.training.watching.activity import (
    FORWARD_BACKWARD,
    GRADIENTS,
    MEASURING,
    UPDATE,
    Activity,
)
from megatron_attnres.training.watching.non_finite import (
    GradientProbe,
    OutputProbe,
    first_of_all_ranks,
    gradients_in_words,
    outputs_in_words,
)


@dataclass(frozen=True)
class IterationResult:
    """What an iteration leaves.

    Attributes:
        metrics: of all ranks.
        figures: of every rank, by rank.
        why_skipped: where the value came from for which the update was skipped, if it was.
    """

    metrics: IterationMetrics
    figures: Sequence[RankFigures]
    why_skipped: str | None


class Iteration:
    """Runs single iterations. Collective.

    Args:
        config: of the run.
        groups: process groups.
        step: forward and backward.
        optimizer: update.
        scheduler: Megatron-Core's learning-rate scheduler.
        data: micro-batches.
        activity: what this rank does, for its heartbeat.
        profile: records steps; None where nothing is to be recorded.
        peak_tflops: of one accelerator; None if not known.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ParallelGroups,
        step: PipelineStep,
        optimizer: TrainingOptimizer,
        scheduler: Any,
        data: BatchSource,
        activity: Activity,
        profile: TrainingProfile | None,
        peak_tflops: float | None,
    ) -> None:
        self._config = config
        self._groups = groups
        self._step = step
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._data = data
        self._activity = activity
        self._profile = profile
        self._peak_tflops = peak_tflops
        self._probe = GradientProbe(step.chunks, main_gradient)

    def run(self, state: TrainingState, iterators: list[Iterator[Batch]]) -> IterationResult:
        """Train on the next global batch; advances the state."""
        start = time.perf_counter()
        activity = self._activity
        activity.begin(state.iteration + 1)
        with activity.doing(FORWARD_BACKWARD):
            record = self._forward_backward(state, iterators)
        self._probe.look()
        with activity.doing(GRADIENTS):
            finish_gradients(self._step.chunks, self._groups.collection, main_gradient)
        learning_rate = current_learning_rate(self._optimizer)
        with activity.doing(UPDATE):
            update = self._optimizer.step()
        self._scheduler.step(1)
        with activity.doing(MEASURING):
            lm_loss = mean_loss_of_batch(record.losses, self._groups)
            figures = figures_of_all_ranks(self._figures(record))
        seconds = time.perf_counter() - start
        why_skipped = self._why_skipped(state, lm_loss) if update.skipped else None

        batch = self._config.loop.global_batch_size
        tokens = batch * self._config.model.seq_length
        state.iteration += 1
        state.consumed_samples += batch
        state.tokens += tokens
        state.skipped_steps += update.skipped
        ranks = len(figures)
        tflops = model_tflops_per_rank(self._config.model, batch, seconds, ranks)
        metrics = IterationMetrics(
            iteration=state.iteration,
            lm_loss=lm_loss,
            grad_norm=update.grad_norm,
            learning_rate=learning_rate,
            tokens=state.tokens,
            step_seconds=seconds,
            tokens_per_second=tokens / seconds,
            tokens_per_second_per_rank=tokens / seconds / ranks,
            model_tflops_per_rank=tflops,
            **average(figures),
            update_skipped=update.skipped,
            skipped_steps=state.skipped_steps,
            mfu=tflops / self._peak_tflops if self._peak_tflops is not None else None,
        )
        return IterationResult(metrics, figures, why_skipped)

    def _forward_backward(
        self, state: TrainingState, iterators: list[Iterator[Batch]]
    ) -> StepRecord:
        with self._recorded(state.iteration + 1):
            return self._step.run(
                getting_on(forward_step, self._activity),
                iterators,
                self._config.num_microbatches,
                samples=self._data.samples_of_step(state.consumed_samples),
            )

    def _figures(self, record: StepRecord) -> RankFigures:
        seconds = self._activity.seconds
        return RankFigures(
            record.traffic.total("forward"),
            record.traffic.total("backward"),
            peak_memory(),
            record.peak_cached_entries,
            seconds[FORWARD_BACKWARD] - record.wait_seconds,
            record.wait_seconds,
            seconds[GRADIENTS],
            seconds[UPDATE],
        )

    def _why_skipped(self, state: TrainingState, lm_loss: float) -> str:
        """Where the first value that is not finite came from; ``state`` is that before the step."""
        if math.isfinite(lm_loss):
            return gradients_in_words(first_of_all_ranks(self._probe.first_bad()))
        probe = OutputProbe()
        with probe.watch(self._step.chunks), torch.no_grad():
            self._step.run(
                getting_on(forward_step, self._activity),
                one_per_chunk(self._step, self._data.training_batches(state.consumed_samples)),
                self._config.num_microbatches,
                forward_only=True,
                samples=self._data.samples_of_step(state.consumed_samples),
            )
        return outputs_in_words(first_of_all_ranks(probe.first_bad()))

    def _recorded(self, iteration: int) -> AbstractContextManager[None]:
        return nullcontext() if self._profile is None else self._profile.step(iteration)


def one_per_chunk(step: PipelineStep, batches: Iterator[Batch]) -> list[Iterator[Batch]]:
    """A rank has at most one chunk that reads data (or the whole model): all share the batches."""
    return [batches for _ in step.chunks]


def getting_on(step: Callable[..., Any], activity: Activity) -> Callable[..., Any]:
    """A forward step that tells the heartbeat that the rank is not stuck."""

    def forward(*arguments: Any) -> Any:
        activity.get_on()
        return step(*arguments)

    return forward
