"""Sets up what looks after a run. Collective over all ranks."""

import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import distributed

from megatron_attnres.errors import InputError
from megatron_attnres.parallel.agreement import same_error_on_all_ranks
from megatron_attnres.training.checkpoints.folders import folder_of, iterations_in
from megatron_attnres.training.launch import STACK_SIGNAL
from megatron_attnres.training.run_config import RunConfig
from megatron_attnres.training.watching.activity import Activity
from megatron_attnres.training.watching.rank_record import host_name
from megatron_attnres.training.watching.rank_watch import RankWatch, dump_stacks_on_signal
from megatron_attnres.training.watching.run_folder import RunFolder


def new_activity() -> Activity:
    """Of this rank, timed on its device."""
    return Activity(torch.cuda.synchronize if torch.cuda.is_available() else lambda: None)


def open_watch(config: RunConfig, activity: Activity) -> RankWatch | None:
    """Start this rank's heartbeat and let SIGUSR2 dump its stacks; no heartbeat without a folder.

    Raises:
        InputError: the folder cannot be written; the same on all ranks.
    """
    if config.watch.run_dir is None:
        dump_stacks_on_signal(STACK_SIGNAL, None)
        return None
    folder, rank = RunFolder(Path(config.watch.run_dir)), distributed.get_rank()
    attempt = [time.strftime("%Y%m%dT%H%M%S")]
    distributed.broadcast_object_list(attempt)
    watch = RankWatch(
        folder,
        attempt[0],
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
