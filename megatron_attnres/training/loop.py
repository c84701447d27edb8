"""The training loop: iterate, validate, save, watch, until the end or a reason to stop."""

import time
from dataclasses import replace

import torch
from torch import Tensor

from megatron_attnres.parallel.groups import ParallelGroups
from megatron_attnres.pipeline.step import PipelineStep
from megatron_attnres.training.batches import BatchSource
from megatron_attnres.training.checkpoints.description import TrainingState
from megatron_attnres.training.checkpoints.resumable import Resumable
from megatron_attnres.training.course import Course
from megatron_attnres.training.forward_step import forward_step
from megatron_attnres.training.iteration import Iteration, getting_on, one_per_chunk
from megatron_attnres.training.metrics import mean_loss_of_batch
from megatron_attnres.training.profiling import TrainingProfile
from megatron_attnres.training.run_config import RunConfig
from megatron_attnres.training.sinks import Sinks
from megatron_attnres.training.stopping import StopRequest
from megatron_attnres.training.watching.activity import SAVING, VALIDATING, Activity


class TrainingLoop:
    """Runs iterations from a state to ``--train-iters``. Collective.

    Args:
        config: of the run.
        groups: process groups.
        step: forward and backward, for validation.
        iteration: trains on one global batch.
        data: micro-batches.
        resumable: saves.
        stop: reasons to end early.
        sinks: where metrics go; empty on the ranks that do not write.
        course: raises alarms.
        activity: what this rank does, for its heartbeat.
        profile: records steps; None where nothing is to be recorded.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ParallelGroups,
        step: PipelineStep,
        iteration: Iteration,
        data: BatchSource,
        resumable: Resumable,
        stop: StopRequest,
        sinks: Sinks,
        course: Course,
        activity: Activity,
        profile: TrainingProfile | None,
    ) -> None:
        self._config = config
        self._groups = groups
        self._step = step
        self._iteration = iteration
        self._data = data
        self._resumable = resumable
        self._saver = resumable.saver()
        self._stop = stop
        self._sinks = sinks
        self._course = course
        self._activity = activity
        self._profile = profile

    def run(self, state: TrainingState) -> str | None:
        """Train until the last iteration, or until asked to stop.

        Returns:
            Why the run stopped before its last iteration; None if it did not.

        Raises:
            TrainingGaveUp: too many updates in a row were skipped.
        """
        loop = self._config.loop
        iterators = one_per_chunk(self._step, self._data.training_batches(state.consumed_samples))
        # A signal may have come while the run was being built.
        reason = self._stop.reason(is_start=True)
        while state.iteration < loop.train_iters and reason is None:
            if self._profile is not None:
                self._profile.before(state.iteration + 1)
            result = self._iteration.run(state, iterators)
            metrics = result.metrics
            if self._data.validation is not None and self._is_due(state, loop.eval_interval):
                with self._activity.doing(VALIDATING):
                    metrics = replace(metrics, validation_loss=self._validate())
            reason = self._stop.reason()
            if self._saver is not None:
                with self._activity.doing(SAVING):
                    metrics = replace(
                        metrics, save_pause_seconds=self._save(state, reason is not None)
                    )
            self._sinks.write(metrics)
            self._course.look(replace(result, metrics=metrics))
            if self._profile is not None:
                self._profile.after(state.iteration, reason is not None)
        return reason if state.iteration < loop.train_iters else None

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

    def _validate(self) -> float:
        """Mean loss over ``--eval-iters`` global batches, nats per token."""
        iterators = one_per_chunk(self._step, self._data.validation_batches())
        losses: list[dict[str, Tensor]] = []
        forward = getting_on(forward_step, self._activity)
        with torch.no_grad():
            for _ in range(self._config.loop.eval_iters):
                record = self._step.run(
                    forward, iterators, self._config.num_microbatches, forward_only=True
                )
                losses += record.losses
        return mean_loss_of_batch(losses, self._groups)

    def _is_due(self, state: TrainingState, interval: int | None) -> bool:
        """Every so many iterations and at the end."""
        last = state.iteration == self._config.loop.train_iters
        return last or (interval is not None and state.iteration % interval == 0)
