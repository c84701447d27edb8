"""Writing a checkpoint of weights that were not trained here: no optimizer, no job of ranks.

Tensors are made one by one while they are written, so that memory holds one of them.
"""

import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_attnres.training.checkpoints.description import Description
from megatron_attnres.training.checkpoints.folders import (
    WRITING,
    digest_of,
    folder_of,
    publish,
)
from megatron_attnres.training.checkpoints.plans import WEIGHTS


@dataclass(frozen=True)
class ComingTensor:
    """A whole tensor that is made when it is written.

    Attributes:
        shape: of it.
        make: returns it, in float32.
    """

    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def write_weights(
    save: Path, description: Description, tensors: Mapping[str, ComingTensor]
) -> Path:
    """Write a checkpoint that ``--load-weights-only``, evaluation and export read.

    Args:
        save: folder of checkpoints; made if it is missing. Its ``latest`` names the new one.
        description: of the checkpoint.
        tensors: by global parameter name.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: it cannot be written; nothing of it is left then.
    """
    final = folder_of(str(save), description.state.iteration)
    writing = final.with_name(final.name + WRITING)
    try:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        planner = _ComingTensorPlanner({f"{WEIGHTS}.{name}": one for name, one in tensors.items()})
        _save(writing, planner)
        description.write(writing)
        publish(writing, final, {path.name: digest_of(path) for path in sorted(writing.iterdir())})
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    return final


def _save(writing: Path, planner: DefaultSavePlanner) -> None:
    # One thread, so that each tensor is made when the one before is on disk, and a file for each:
    # torch keeps the tensors of a file until it is closed.
    writer = dcp.FileSystemWriter(writing, thread_count=1, single_file_per_rank=False)
    try:
        with warnings.catch_warnings():
            # That one process saves alone is what is meant here.
            warnings.simplefilter("ignore", UserWarning)
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        # Torch wraps whatever went wrong on the one rank there is.
        cause, _ = next(iter(error.failures.values()))
        raise _behind(cause) from error


def _behind(error: BaseException) -> BaseException:
    """What stopped torch's writer, which then complains of what it could not finish."""
    stopped = error.__context__
    if isinstance(error, RuntimeError) and isinstance(stopped, OSError | KeyboardInterrupt):
        return stopped
    return error


class _ComingTensorPlanner(DefaultSavePlanner):
    """One rank writes all tensors, each whole."""

    def __init__(self, tensors: Mapping[str, ComingTensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def create_local_plan(self) -> SavePlan:
        """See the base class."""
        return SavePlan(
            [_write_item(name, torch.Size(one.shape)) for name, one in self._tensors.items()],
            planner_data={},
        )

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Make a tensor.

        Raises:
            ValueError: it is not what it was announced to be.
        """
        name = write_item.index.fqn
        tensor = self._tensors[name].make()
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != self._tensors[name].shape:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype}, announced as "
                f"{self._tensors[name].shape} torch.float32"
            )
        return tensor.contiguous()


def _write_item(name: str, shape: torch.Size) -> WriteItem:
    offsets = torch.Size([0] * len(shape))
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, shape),
            properties=TensorProperties(dtype=torch.float32),
            size=shape,
        ),
    )
