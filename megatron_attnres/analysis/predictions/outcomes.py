"""Many predictions at once, on all CPU cores. A prediction's figures, not its timeline."""

import gc
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import NamedTuple

from megatron_attnres.analysis.predictions.collection import collection_paused
from megatron_attnres.analysis.predictions.scenario import Scenario
from megatron_attnres.errors import InputError
from megatron_attnres.pipeline.simulator.network import Network, free_network
from megatron_attnres.pipeline.simulator.schedule import ScheduleSizes
from megatron_attnres.pipeline.simulator.workload import (
    Payload,
    Workload,
    peak_summary_entries,
    predict_seconds,
)

# Fewer forwards and backwards than this are predicted before other processes have started.
_FEW = 20_000


class Job(NamedTuple):
    """One prediction to make."""

    workload: Workload
    payload: Payload
    network: Network


class Outcome(NamedTuple):
    """What a comparison needs of a prediction.

    Attributes:
        seconds: step time.
        peak_entries: most entries that a rank holds at once.
    """

    seconds: float
    peak_entries: int


def workload_of(scenario: Scenario, reads_depth: bool) -> Workload:
    """The scenario's computations with or without Attention Residuals.

    Raises:
        InputError: Megatron-Core's schedule does not take the sizes.
    """
    layout = scenario.layout
    sizes = ScheduleSizes(
        layout.pipeline,
        layout.virtual_pipeline,
        scenario.num_microbatches,
        scenario.microbatch_group_size,
        scenario.overlap_p2p,
    )
    seconds = scenario.times.of_chunks(scenario.layers_per_chunk, reads_depth)
    workload = Workload(sizes, scenario.layers_per_chunk, *seconds, scenario.entry_bytes)
    try:
        with collection_paused():
            _ = workload.operations
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"--num-microbatches {sizes.num_microbatches} and "
            "--microbatch-group-size-per-virtual-pipeline-stage "
            f"{sizes.microbatch_group_size}: Megatron-Core's schedule takes neither: "
            f"{' '.join(str(error).split())}"
        ) from None
    return workload


def job_of(scenario: Scenario, payload: Payload) -> Job:
    """A prediction of the scenario.

    Raises:
        InputError: see ``workload_of``.
    """
    workload = workload_of(scenario, reads_depth=payload.block_size is not None)
    return Job(workload, payload, scenario.network)


def without_communication(job: Job) -> Job:
    """The same where transfers take no time: compute and the schedule's bubble are left."""
    # All payloads are alike then; the smallest is the quickest to play.
    network = free_network(job.workload.schedule.pipeline_size)
    return Job(job.workload, Payload(None), network)


def outcomes_of(jobs: Sequence[Job]) -> dict[Job, Outcome]:
    """Make predictions, equal ones once."""
    # Those with relay lanes take longest and come first, so that the cores end together.
    distinct = sorted(dict.fromkeys(jobs), key=_computations, reverse=True)
    processes = min(len(distinct), len(os.sched_getaffinity(0)))
    with collection_paused():
        if processes == 1 or sum(map(_computations, distinct)) < _FEW:
            return {job: _outcome(job) for job in distinct}
        # The schedules stay for good: no later search for garbage, the one at exit included, needs
        # to look at them.
        gc.freeze()
        # Not multiprocessing's Pool, which waits for ever for what a killed process was to do.
        with ProcessPoolExecutor(
            processes, get_context("fork"), _start_worker, (distinct,)
        ) as pool:
            try:
                found = list(pool.map(_outcome_of_index, range(len(distinct))))
            except BrokenProcessPool:
                raise InputError(
                    "a process that predicted steps was killed, perhaps for want of memory; give "
                    "fewer micro-batches, chunks or sweep points"
                ) from None
            return dict(zip(distinct, found, strict=True))


def _computations(job: Job) -> int:
    schedule = job.workload.schedule
    computations = 2 * len(job.workload.layers_per_chunk) * schedule.num_microbatches
    return computations * (1 + job.payload.early_relay)


def _outcome(job: Job) -> Outcome:
    return Outcome(predict_seconds(*job), peak_summary_entries(job.workload, job.payload))


_jobs: Sequence[Job] = ()


def _start_worker(jobs: Sequence[Job]) -> None:
    """Take the jobs as they are in the parent's memory; leave signals to the parent."""
    global _jobs
    _jobs = jobs
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _outcome_of_index(index: int) -> Outcome:
    return _outcome(_jobs[index])
