"""Looks at every iteration: skipped updates, alarms, stragglers."""

from collections.abc import Sequence

from megatron_attnres.errors import TrainingGaveUp
from megatron_attnres.training.iteration import IterationResult
from megatron_attnres.training.run_config import RunConfig
from megatron_attnres.training.watching.alarms import AlarmConfig, Alarms
from megatron_attnres.training.watching.events import EventLog
from megatron_attnres.training.watching.stragglers import (
    Straggler,
    StragglerConfig,
    Stragglers,
)


def open_course(config: RunConfig, hosts: Sequence[str], events: EventLog | None) -> "Course":
    """As the run's flags say."""
    watch = config.watch
    return Course(
        watch.max_skipped_steps,
        Alarms(
            AlarmConfig(
                watch.alarm_window, watch.loss_spike_deviations, watch.grad_norm_alarm_ratio
            )
        ),
        Stragglers(
            StragglerConfig(watch.straggler_interval, watch.straggler_ratio), config.layout.pipeline
        ),
        hosts,
        events,
    )


class Course:
    """The same on all ranks, so that all give up together; one of them writes.

    Args:
        max_skipped_steps: updates in a row that may be skipped.
        alarms: of loss and gradient norm.
        stragglers: slow ranks.
        hosts: of every rank.
        events: where alarms go; None on the ranks that do not write.
    """

    def __init__(
        self,
        max_skipped_steps: int,
        alarms: Alarms,
        stragglers: Stragglers,
        hosts: Sequence[str],
        events: EventLog | None,
    ) -> None:
        self._max_skipped_steps = max_skipped_steps
        self._alarms = alarms
        self._stragglers = stragglers
        self._hosts = hosts
        self._events = events
        self._skipped_in_a_row = 0

    def look(self, result: IterationResult) -> None:
        """One more iteration.

        Raises:
            TrainingGaveUp: too many updates in a row were skipped.
        """
        metrics = result.metrics
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if metrics.update_skipped else 0
        if metrics.update_skipped:
            self._skipped(result)
        elif self._events is not None:
            for alarm in self._alarms.look(metrics.iteration, metrics.lm_loss, metrics.grad_norm):
                self._events.add(alarm.kind, metrics.iteration, alarm.message)
        if self._events is not None:
            compute = [figures.compute_seconds for figures in result.figures]
            for slow in self._stragglers.look(compute):
                self._events.add(
                    "straggler",
                    metrics.iteration,
                    self._straggler_in_words(metrics.iteration, slow),
                    rank=slow.rank,
                    host=self._hosts[slow.rank],
                    ratio=slow.ratio,
                )

    def _skipped(self, result: IterationResult) -> None:
        metrics = result.metrics
        message = (
            f"iteration {metrics.iteration}: no update, {self._skipped_in_a_row} in a row, "
            f"{metrics.skipped_steps} in all: {result.why_skipped}"
        )
        if self._events is not None:
            self._events.add("skipped", metrics.iteration, message)
        if self._skipped_in_a_row > self._max_skipped_steps:
            verdict = (
                f"--max-skipped-steps {self._max_skipped_steps}: {self._skipped_in_a_row} updates "
                f"in a row were skipped; last: {result.why_skipped}"
            )
            if self._events is not None:
                self._events.add("gave up", metrics.iteration, verdict)
            raise TrainingGaveUp(verdict)

    def _straggler_in_words(self, iteration: int, slow: Straggler) -> str:
        return (
            f"iteration {iteration}: rank {slow.rank} on {self._hosts[slow.rank]} computes "
            f"{slow.seconds * 1e3:.1f} ms a step, {slow.ratio:.2f} times the fastest of stage "
            f"{slow.stage} ({slow.fastest * 1e3:.1f} ms)"
        )
