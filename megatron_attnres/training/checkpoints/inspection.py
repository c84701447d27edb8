"""What a checkpoint holds, in short. Reads no tensor."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from megatron_attnres.training.checkpoints.description import Description
from megatron_attnres.training.checkpoints.plans import WEIGHTS
from megatron_attnres.training.checkpoints.stored_checkpoint import (
    StoredCheckpoint,
    StoredFile,
    StoredTensor,
)

# Every parameter of depth attention belongs to a module whose name ends so, and no other does.
_DEPTH_ATTENTION = "reader."


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters, a tied embedding counted once.

    Attributes:
        total: of the model.
        weight_decayed: matrices, depth attention's excluded.
        not_decayed: vectors, and all of depth attention.
        depth_attention: those among them that are depth attention's.
    """

    total: int
    weight_decayed: int
    not_decayed: int
    depth_attention: int


@dataclass(frozen=True)
class Summary:
    """A checkpoint in short.

    Attributes:
        folder: where it lies.
        iteration, consumed_samples, tokens, skipped_steps, optimizer_steps: where its run stood.
        layout: of the run that wrote it, with ZeRO stage and precision, by name; None for what its
            description does not say.
        plan_digest: of that run's pipeline plan.
        model, data: what must match to load it, flat, by name; the digest of samples included.
        files: all of the folder's.
        total_bytes: of the files.
        parameters: counts by group.
        bytes_by_kind: of the tensors' numbers.
        tensors: every whole tensor.
    """

    folder: str
    iteration: int
    consumed_samples: int
    tokens: int
    skipped_steps: int
    optimizer_steps: int
    layout: dict[str, Any]
    plan_digest: str
    model: dict[str, Any]
    data: dict[str, Any]
    files: list[StoredFile]
    total_bytes: int
    parameters: ParameterCounts
    bytes_by_kind: dict[str, int]
    tensors: list[StoredTensor]


def summarise(checkpoint: StoredCheckpoint) -> Summary:
    """A checkpoint in short; reads no tensor.

    Raises:
        InputError: its folder cannot be listed.
    """
    description, files = checkpoint.description, checkpoint.files()
    tensors = list(checkpoint.tensors.values())
    return Summary(
        folder=str(checkpoint.folder),
        **asdict(description.state),
        optimizer_steps=description.optimizer_steps,
        layout=layout_of(description),
        plan_digest=description.plan_digest,
        model=description.model,
        data=data_of(description),
        files=files,
        total_bytes=sum(file.bytes for file in files),
        parameters=count_parameters(tensors),
        bytes_by_kind=bytes_by_kind(tensors),
        tensors=tensors,
    )


def count_parameters(tensors: Iterable[StoredTensor]) -> ParameterCounts:
    """By the rule of ``takes_weight_decay``, from names and shapes alone."""
    total = decayed = depth = 0
    for tensor in tensors:
        if tensor.kind != WEIGHTS:
            continue
        total += tensor.numbers
        if _DEPTH_ATTENTION in tensor.name:
            depth += tensor.numbers
        elif len(tensor.shape) > 1:
            decayed += tensor.numbers
    return ParameterCounts(total, decayed, total - decayed, depth)


def bytes_by_kind(tensors: Iterable[StoredTensor]) -> dict[str, int]:
    """Bytes of master weights and of each moment."""
    found: Counter[str] = Counter()
    for tensor in tensors:
        found[tensor.kind] += tensor.bytes
    return dict(found)


def layout_of(description: Description) -> dict[str, Any]:
    """How the run that wrote a checkpoint was laid out; None for what it does not say."""
    layout = description.configuration.get("layout", {})
    optimizer = description.configuration.get("optimizer", {})
    sizes = ("tensor", "pipeline", "virtual_pipeline", "data")
    return {
        **{name: layout.get(name) for name in sizes},
        "zero_stage": optimizer.get("zero_stage"),
        "precision": optimizer.get("precision"),
        "sequence_parallel": layout.get("sequence_parallel"),
        "layers_per_chunk": layout.get("layers_per_chunk"),
    }


def data_of(description: Description) -> dict[str, Any]:
    """What decided on the order of samples, and the digest of that order."""
    return description.data | {"order": description.order}
