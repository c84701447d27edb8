"""The training loop: iterate, measure, validate, save."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_attnres.data.batches import Batch
from megatron_attnres.optimizer.learning_rate import current_learning_rate
from megatron_attnres.optimizer.main_gradients import main_gradient
from megatron_attnres.optimizer.training_optimizer import TrainingOptimizer
from megatron_attnres.parallel.gradients import finish_gradients
from megatron_attnres.parallel.groups import ParallelGroups
from megatron_attnres.pipeline.step import PipelineStep
from megatron_attnres.training.batches import BatchSource
from megatron_attnres.training.checkpoints.description import TrainingState
from megatron_attnres.training.checkpoints.resumable import Resumable
from megatron_attnres.training.forward_step import forward_step
from megatron_attnres.training.launch import STOP_SIGNALS
from megatron_attnres.training.metrics import (
    IterationMetrics,
    Sinks,
    bytes_of_all_ranks,
    largest_of_all_ranks,
    mean_loss_of_batch,
    peak_memory,
)
from megatron_attnres.training.profiling import TrainingProfile
from megatron_attnres.training.run_config import RunConfig
from megatron_attnres.training.stopping import StopRequest


class TrainingLoop:
    """Runs iterations from a state to ``--train-iters``.

    Args:
        config: of the run.
        groups: process groups.
        step: forward and backward.
        optimizer: update.
        scheduler: Megatron-Core's learning-rate scheduler.
        data: micro-batches.
        resumable: saves.
        sinks: where metrics go; empty on the ranks that do not write.
        profile: records steps; None where nothing is to be recorded.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ParallelGroups,
        step: PipelineStep,
        optimizer: TrainingOptimizer,
        scheduler: Any,
        data: BatchSource,
        resumable: Resumable,
        sinks: Sinks,
        profile: TrainingProfile | None,
    ) -> None:
        self._config = config
        self._groups = groups
        self._step = step
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._data = data
        self._resumable = resumable
        self._saver = resumable.saver()
        self._sinks = sinks
        self._profile = profile
        self._stop = StopRequest(
            STOP_SIGNALS if config.loop.save_on_signal else (), config.loop.exit_duration_minutes
        )

    def run(self, state: TrainingState) -> None:
        """Train until the last iteration, or until asked to stop."""
        loop = self._config.loop
        iterators = self._iterators(self._data.training_batches(state.consumed_samples))
        stops = False
        while state.iteration < loop.train_iters and not stops:
            if self._profile is not None:
                self._profile.before(state.iteration + 1)
            metrics = self._iteration(state, iterators)
            if self._data.validation is not None and self._is_due(state, loop.eval_interval):
                metrics = replace(metrics, validation_loss=self._validate())
            stops = self._stop.is_set()
            if self._saver is not None:
                metrics = replace(metrics, save_pause_seconds=self._save(state, stops))
            self._sinks.write(metrics)
            if self._profile is not None:
                self._profile.after(state.iteration, stops)

    def _save(self, state: TrainingState, stops: bool) -> float | None:
        """Save if it is time, look after the save in flight. Seconds if one was begun."""
        start = time.perf_counter()
        saver = self._saver
        saver.poll()
        last = stops or state.iteration == self._config.loop.train_iters
        due = stops or self._is_due(state, self._config.loop.save_interval)
        begins = due or saver.must_try_again
        if begins:
            saver.start(self._resumable.describe(state))
        pause = time.perf_counter() - start
        if last:
            saver.finish()
            while saver.must_try_again:
                saver.start(self._resumable.describe(state))
                saver.finish()
        return pause if begins else None

    def _iteration(
        self, state: TrainingState, iterators: list[Iterator[Batch]]
    ) -> IterationMetrics:
        """Forward, backward, finish gradients, update; advances the state."""
        start = time.perf_counter()
        with self._recorded(state.iteration + 1):
            record = self._step.run(
                forward_step,
                iterators,
                self._config.num_microbatches,
                samples=self._data.samples_of_step(state.consumed_samples),
            )
        finish_gradients(self._step.chunks, self._groups.collection, main_gradient)
        learning_rate = current_learning_rate(self._optimizer)
        update = self._optimizer.step()
        self._scheduler.step(1)
        lm_loss = mean_loss_of_batch(record.losses, self._groups)
        bytes_forward, bytes_backward = bytes_of_all_ranks(record.traffic)
        memory, cached = largest_of_all_ranks(peak_memory(), record.peak_cached_entries)
        seconds = time.perf_counter() - start

        batch = self._config.loop.global_batch_size
        tokens = batch * self._config.model.seq_length
        state.iteration += 1
        state.consumed_samples += batch
        state.tokens += tokens
        return IterationMetrics(
            iteration=state.iteration,
            lm_loss=lm_loss,
            grad_norm=update.grad_norm,
            learning_rate=learning_rate,
            tokens=state.tokens,
            step_seconds=seconds,
            tokens_per_second=tokens / seconds,
            p2p_bytes_forward=bytes_forward,
            p2p_bytes_backward=bytes_backward,
            peak_memory_bytes=memory,
            peak_cached_sources=cached,
            update_skipped=update.skipped,
        )

    def _recorded(self, iteration: int) -> AbstractContextManager[None]:
        return nullcontext() if self._profile is None else self._profile.step(iteration)

    def _validate(self) -> float:
        """Mean loss over ``--eval-iters`` global batches, nats per token."""
        iterators = self._iterators(self._data.validation_batches())
        losses: list[dict[str, Tensor]] = []
        with torch.no_grad():
            for _ in range(self._config.loop.eval_iters):
                record = self._step.run(
                    forward_step, iterators, self._config.num_microbatches, forward_only=True
                )
                losses += record.losses
        return mean_loss_of_batch(losses, self._groups)

    def _iterators(self, batches: Iterator[Batch]) -> list[Iterator[Batch]]:
        """One per chunk; a rank has at most one chunk that reads data (or the whole model)."""
        return [batches for _ in self._step.chunks]

    def _is_due(self, state: TrainingState, interval: int | None) -> bool:
        """Every so many iterations and at the end."""
        last = state.iteration == self._config.loop.train_iters
        return last or (interval is not None and state.iteration % interval == 0)
