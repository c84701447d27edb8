"""The beginning and the end of a start of the run, as events. One rank writes them."""

import os
from collections.abc import Sequence
from pathlib import Path

from torch import distributed

from megatron_attnres.training.run_config import RunConfig
from megatron_attnres.training.watching.events import EventLog
from megatron_attnres.training.watching.run_folder import RunFolder
from megatron_attnres.training.watching.start import next_start

MOST_HOSTS = 8


def open_events(config: RunConfig) -> EventLog | None:
    """The run's events; None on the ranks that do not write."""
    if distributed.get_rank() != 0:
        return None
    run_dir = config.watch.run_dir
    return EventLog(RunFolder(Path(run_dir)).events if run_dir is not None else None)


def say_start(
    events: EventLog | None, config: RunConfig, iteration: int, hosts: Sequence[str]
) -> None:
    """Where the run goes on, and who takes part.

    Args:
        events: where to say it, if here.
        config: of the run.
        iteration: after which it goes on; 0 at the beginning.
        hosts: of every rank.
    """
    if events is None:
        return
    names = sorted(set(hosts))
    noun = "host" if len(names) == 1 else "hosts"
    more = ", ..." if len(names) > MOST_HOSTS else ""
    where = f"{len(hosts)} ranks on {len(names)} {noun} ({', '.join(names[:MOST_HOSTS])}{more})"
    job = os.environ.get("SLURM_JOB_ID")
    slurm = f", Slurm job {job}" if job else ""
    at = f"after iteration {iteration}" if iteration else "at the beginning"
    iterations = config.loop.train_iters
    events.add(
        "start",
        iteration,
        f"{at} of {iterations} iterations, {where}{slurm}",
        train_iters=iterations,
    )


def say_end(events: EventLog | None, config: RunConfig, iteration: int, reason: str | None) -> None:
    """That all iterations are done, or why the run stopped and where it goes on.

    Args:
        events: where to say it, if here.
        config: of the run.
        iteration: that was done last.
        reason: of a run that was asked to stop.
    """
    if events is None:
        return
    if reason is None:
        events.add("end", iteration, f"all {iteration} iterations are done")
        return
    goes_on = next_start(config.loop.save)
    events.add("stop", iteration, f"{reason}: stopped after iteration {iteration}; {goes_on}")
