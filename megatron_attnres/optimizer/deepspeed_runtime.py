"""Brings DeepSpeed up beside a running torch.distributed: silently, compiling nothing."""

import logging

import torch.distributed as dist

from megatron_attnres.parallel.cpu import without_compiler


def start_deepspeed() -> None:
    """Make `deepspeed.comm` a thin wrapper of torch.distributed; looks for no launcher or MPI.

    Call it after `init_process_group`.
    """
    import_deepspeed()
    import deepspeed

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


def import_deepspeed() -> None:
    """Call it before anything else imports deepspeed."""
    # On import DeepSpeed warns once per rank that it found no accelerator, on standard output.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    with without_compiler():
        import deepspeed.comm
        import deepspeed.ops

        # ZeRO imports it in the first step, which would wait for the compiler to be loaded.
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
