"""Tells the errors of transfers and collectives, whose cause is another rank, from a rank's own."""

from torch import distributed

from megatron_attnres.pipeline.transfer import PipelineTransferError

# How torch.distributed's backends sign errors that have no type of their own.
_SIGNATURES = ("gloo", "NCCL", "ProcessGroup", "Connection closed by peer", "Connection reset")


def comes_from_elsewhere(error: BaseException) -> bool:
    """Whether another rank, or the network, is the reason of an error."""
    if isinstance(error, (PipelineTransferError, distributed.DistError, ConnectionError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNATURES)
