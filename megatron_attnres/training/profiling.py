"""``--profile-pipeline``: records the steps of some iterations and writes what they show."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from megatron_attnres.optimizer.configuration import BYTES_PER_ELEMENT
from megatron_attnres.parallel.cpu import device
from megatron_attnres.parallel.groups import ParallelGroups
from megatron_attnres.pipeline.plan_report import EntrySize
from megatron_attnres.pipeline.profiler.profiler import PipelineProfiler
from megatron_attnres.pipeline.step import PipelineStep
from megatron_attnres.pipeline.timeline.output import write_outputs
from megatron_attnres.pipeline.timeline.records import TimelineLayout, Timelines
from megatron_attnres.training.build import make_plan
from megatron_attnres.training.run_config import ProfileConfig, RunConfig


def open_profile(
    config: RunConfig, step: PipelineStep, groups: ParallelGroups
) -> "TrainingProfile | None":
    """The profile that the run asks for, if any. Collective."""
    if config.profile is None:
        return None
    profiler = PipelineProfiler(step, timeline_layout(config), device(), groups.timeout)
    return TrainingProfile(config.profile, profiler)


def timeline_layout(config: RunConfig) -> TimelineLayout:
    """What a run's timelines say of its layout."""
    plan = make_plan(config.model, config.layout, config.schedule.policy)
    entry = EntrySize(
        config.model.seq_length,
        config.loop.micro_batch_size,
        config.model.hidden_size,
        BYTES_PER_ELEMENT[config.optimizer.precision],
        config.layout.tensor if config.layout.sequence_parallel else 1,
    )
    return TimelineLayout(
        plan.layers_per_chunk,
        plan.pipeline_size,
        plan.block_size,
        plan.policy,
        config.schedule.early_relay,
        config.num_microbatches,
        config.schedule.microbatch_group_size,
        config.schedule.overlap_p2p,
        entry.bytes,
    )


class TrainingProfile:
    """Follows the loop through the iterations that are recorded. All of it is collective.

    Args:
        config: which iterations, and where the result goes.
        profiler: of this rank.
    """

    def __init__(self, config: ProfileConfig, profiler: PipelineProfiler) -> None:
        self._config = config
        self._profiler = profiler
        self._is_open = False

    def before(self, iteration: int) -> None:
        """An iteration is about to start."""
        if not self._is_open and self._is_recorded(iteration):
            self._profiler.begin()
            self._is_open = True

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """The pipeline step of an iteration runs inside."""
        if not self._is_recorded(iteration):
            yield
            return
        with self._profiler.step(iteration):
            yield

    def after(self, iteration: int, stops: bool) -> None:
        """An iteration has ended; ``stops`` if it was the run's last one."""
        if not self._is_open or not (stops or iteration == self._config.last):
            return
        self._is_open = False
        timelines = self._profiler.end()
        if timelines is not None:
            self._write(timelines)

    def _write(self, timelines: Timelines) -> None:
        """A disk that is full, or a record that makes no sense, is no reason to stop training."""
        folder = self._config.folder
        try:
            write_outputs(Path(folder), timelines)
        except (OSError, ValueError) as error:
            tqdm.write(f"--profile-pipeline-dir {folder}: not written: {error}", file=sys.stderr)
        else:
            tqdm.write(f"pipeline profile  {folder}")

    def _is_recorded(self, iteration: int) -> bool:
        return self._config.first <= iteration <= self._config.last
