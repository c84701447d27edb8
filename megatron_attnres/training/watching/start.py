"""Sets up what looks after a run. Collective over all ranks."""

import os
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import distributed

from megatron_attnres.errors import InputError, JoinError
from megatron_attnres.parallel.agreement import same_error_on_all_ranks
from megatron_attnres.training.checkpoints.folders import folder_of, iterations_in
from megatron_attnres.training.launch import STACK_SIGNAL
from megatron_attnres.training.run_config import RunConfig
from megatron_attnres.training.watching.activity import Activity
from megatron_attnres.training.watching.rank_record import RankRecord, host_name, read_record
from megatron_attnres.training.watching.rank_watch import RankWatch, dump_stacks_on_signal
from megatron_attnres.training.watching.run_folder import RunFolder

# Longer than between two beats of any run.
RECENT_SECONDS = 300.0


def new_activity() -> Activity:
    """Of this rank, timed on its device."""
    return Activity(torch.cuda.synchronize if torch.cuda.is_available() else lambda: None)


def open_watch(config: RunConfig, activity: Activity) -> RankWatch | None:
    """Start this rank's heartbeat and let SIGUSR2 dump its stacks; no heartbeat without a folder.

    Raises:
        InputError: the folder cannot be written; the same on all ranks.
        JoinError: another start of the run is alive; the same on all ranks.
    """
    if config.watch.run_dir is None:
        dump_stacks_on_signal(STACK_SIGNAL, None)
        return None
    folder, rank = RunFolder(Path(config.watch.run_dir)), distributed.get_rank()
    attempt = _new_attempt(folder, config.watch.heartbeat_seconds)
    watch = RankWatch(
        folder,
        attempt,
        rank,
        distributed.get_world_size(),
        activity,
        config.watch.heartbeat_seconds,
        60 * config.timeout_minutes,
        lambda: next_start(config.loop.save),
    )
    with same_error_on_all_ranks():
        try:
            watch.start()
            dump_stacks_on_signal(STACK_SIGNAL, folder.stacks(rank))
        except OSError as error:
            raise InputError(
                f"--run-dir {folder.path}: {error.strerror}; give a writable folder"
            ) from error
    return watch


def _new_attempt(folder: RunFolder, heartbeat_seconds: float) -> str:
    """A name for this start, the same on all ranks, if no other one is alive."""
    name, refusal = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.urandom(2).hex()}", None
    if distributed.get_rank() == 0:
        alive = rank_that_lives(folder, 2 * heartbeat_seconds + 1)
        if alive is not None:
            refusal = (
                f"--run-dir {folder.path}: another start of the run is alive: rank {alive.rank} on "
                f"{alive.host}, process {alive.pid}; wait for its end or give another folder"
            )
    agreed = [name, refusal]
    distributed.broadcast_object_list(agreed)
    if agreed[1] is not None:
        raise JoinError(agreed[1])
    return agreed[0]


def rank_that_lives(folder: RunFolder, seconds: float) -> RankRecord | None:
    """A rank of an earlier start that still beats, if any; takes so long to find out."""
    paths = [] if not folder.ranks.is_dir() else sorted(folder.ranks.glob("rank_*.json"))
    running = {path: one for path in paths if (one := read_record(path)) and one.state == "running"}
    # Of a start that was killed long ago nothing needs to be waited for.
    recent = {path for path in running if time.time() - path.stat().st_mtime < RECENT_SECONDS}
    deadline = time.monotonic() + seconds
    while recent and time.monotonic() < deadline:
        time.sleep(0.2)
        for path in recent:
            if (now := read_record(path)) and now.beat > running[path].beat:
                return now
    return None


def hosts_of_all_ranks() -> list[str]:
    """By rank. Collective."""
    hosts = [""] * distributed.get_world_size()
    distributed.all_gather_object(hosts, host_name())
    return hosts


def next_start(save: str | None) -> str:
    """What another start with ``--load auto`` does."""
    iterations: list[int] = []
    if save is not None:
        with suppress(OSError):
            iterations = iterations_in(save)
    if not iterations:
        return "nothing is saved: another start begins anew"
    found = folder_of(save, iterations[-1])
    return f"--load auto goes on after iteration {iterations[-1]}, from {found}"
