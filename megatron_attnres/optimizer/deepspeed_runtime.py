"""Brings DeepSpeed up beside a running torch.distributed: silently, compiling nothing."""

import logging

import torch.distributed as dist


def start_deepspeed() -> None:
    """Make `deepspeed.comm` a thin wrapper of torch.distributed; looks for no launcher or MPI.

    Call it before anything else imports deepspeed, after `init_process_group`.
    """
    # On import DeepSpeed warns once per rank that it found no accelerator, on standard output.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    import deepspeed.comm
    import deepspeed.ops

    if deepspeed.comm.is_initialized():
        return
    # On CPU hosts DeepSpeed would first spend half a minute compiling a shared-memory all-reduce.
    # It serves the group of all ranks only, and no collective of ours uses that group.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.comm.init_distributed(
        dist_backend=dist.get_backend(),
        auto_mpi_discovery=False,
        verbose=False,
        dist_init_required=False,
    )


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
