"""Process groups: Megatron-Core's, made once per job from the layout."""

import gc
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import distributed

from megatron_attnres.errors import JoinError
from megatron_attnres.parallel.cpu import keep_freed_memory, redirect_cuda_calls
from megatron_attnres.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class ParallelGroups:
    """This rank's place in the layout.

    Attributes:
        layout: the sizes.
        collection: Megatron-Core's groups, as its schedules and layers take them.
        timeout: after which a collective or a transfer of any group fails instead of hanging.
    """

    layout: ParallelLayout
    collection: ProcessGroupCollection
    timeout: timedelta

    @property
    def tensor_rank(self) -> int:
        """Rank among those that share every layer."""
        return self.collection.tp.rank()

    @property
    def pipeline_rank(self) -> int:
        """Stage that this rank runs."""
        return self.collection.pp.rank()

    @property
    def data_rank(self) -> int:
        """Replica that this rank belongs to."""
        return self.collection.dp.rank()


def initialize_groups(layout: ParallelLayout, timeout: timedelta) -> ParallelGroups:
    """Make Megatron-Core's process groups. Collective over all ranks of the job.

    Raises:
        ValueError: the job's world size is not the layout's.
    """
    if distributed.get_world_size() != layout.world_size:
        raise ValueError(
            f"the layout needs {layout.world_size} ranks, the job has "
            f"{distributed.get_world_size()}"
        )
    redirect_cuda_calls()
    keep_freed_memory()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=(
            layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
        ),
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout / timedelta(minutes=1),
    )
    collection = ProcessGroupCollection.use_mpu_process_groups(
        ["tp", "pp", "mp", "embd", "pos_embd", "cp", "dp", "dp_cp"]
    )
    return ParallelGroups(layout, collection, timeout)


def initialize_distributed(timeout: timedelta, backend: str | None) -> None:
    """Join the job that the launcher describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    A process started without a launcher becomes a job of one rank.

    Args:
        timeout: of the group of all ranks.
        backend: of torch.distributed; None is nccl where CUDA exists, else gloo.

    Raises:
        JoinError: not all ranks came, or the store is out of reach.
    """
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        _join(backend, timeout)
    else:
        store = distributed.HashStore()
        distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def _join(backend: str, timeout: timedelta) -> None:
    try:
        distributed.init_process_group(backend, timeout=timeout)
    except distributed.DistError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise JoinError(
            f"rank {os.environ['RANK']} on {socket.gethostname()} could not join the "
            f"{os.environ.get('WORLD_SIZE')} ranks of the job at {place}: {reason}"
        ) from error


def leave_job() -> None:
    """Give up all process groups while the interpreter is still whole.

    A group that lives until the interpreter ends takes its threads down in an order that can abort
    the process; Megatron-Core's module globals would keep them so long.
    """
    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()
    gc.collect()
