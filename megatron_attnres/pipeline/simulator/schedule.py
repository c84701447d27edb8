"""Megatron-Core's schedules, asked what they would do: run stage by stage over nothing.

What a schedule computes, posts, sends and waits for, and in which order, depends on sizes alone.
So it is run with a communicator that writes down what it is asked for and with computations that
compute nothing. No process group is needed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_attnres.pipeline.communicator import AttnResP2PCommunicator
from megatron_attnres.pipeline.messages import Direction, LaneKind, Message, ScheduleTable
from megatron_attnres.pipeline.plan import PipelinePlan
from megatron_attnres.pipeline.simulator.operations import Operation


class ScheduleSizes(NamedTuple):
    """All that decides on a schedule's order.

    Attributes:
        pipeline_size: P.
        virtual_size: V.
        num_microbatches: M.
        microbatch_group_size: contiguous micro-batches of one virtual stage.
        overlap_p2p: post receives ahead of compute (V > 1).
    """

    pipeline_size: int
    virtual_size: int
    num_microbatches: int
    microbatch_group_size: int
    overlap_p2p: bool = True


@lru_cache(maxsize=8)
def pipeline_operations(sizes: ScheduleSizes) -> tuple[Sequence[Operation], ...]:
    """What every stage does; remembered, as predictions differ in much else.

    Raises:
        ValueError, RuntimeError: Megatron-Core's, where it refuses the sizes.
    """
    return tuple(schedule_operations(sizes, stage) for stage in range(sizes.pipeline_size))


def schedule_operations(sizes: ScheduleSizes, stage: int) -> list[Operation]:
    """All that a stage does in one training step, by Megatron-Core's own schedule.

    Raises:
        ValueError, RuntimeError: Megatron-Core's, where it refuses the sizes.
    """
    table = schedules.get_schedule_table(
        sizes.num_microbatches, sizes.virtual_size, sizes.microbatch_group_size
    )
    config = _config(sizes)
    communicator = _Recorder(sizes, stage, config)
    communicator.begin_step(table, forward_only=False)
    single = _Group(0, 1)
    interleaved = sizes.virtual_size > 1
    schedule = schedules.get_forward_backward_func(
        sizes.pipeline_size, sizes.virtual_size if interleaved else None
    )
    with _recorded_computations(communicator.diary, _computations(sizes, stage, table)):
        schedule(
            forward_step_func=None,
            data_iterator=[None] * sizes.virtual_size,
            model=[_Chunk(config, v if interleaved else None) for v in range(sizes.virtual_size)],
            num_microbatches=sizes.num_microbatches,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=communicator,
            pg_collection=ProcessGroupCollection(
                tp=single,
                cp=single,
                embd=None,
                pos_embd=None,
                pp=communicator.pp_group,
                dp_cp=single,
            ),
        )
    communicator.end_step()
    return communicator.diary


class _Group(NamedTuple):
    """What the schedules ask of a process group."""

    index: int
    length: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.length


class _Chunk(nn.Module):
    """What the schedules ask of a model's chunk besides computing."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: TransformerConfig, virtual_stage: int | None) -> None:
        super().__init__()
        self.config = config
        self.vp_stage = virtual_stage


class _RecordingTransfer(NamedTuple):
    """In the place of a receive's ``Transfer``."""

    diary: list[Operation]
    message: Message
    kind: LaneKind
    tensor: torch.Tensor

    def wait(self) -> None:
        self.diary.append(Operation("wait", self.message, self.kind))


class _RecordingWire:
    """In the place of ``Wire``: writes down what is handed over."""

    def __init__(self, diary: list[Operation]) -> None:
        self._diary = diary
        self._nothing = torch.empty(0)

    def receive(self, message: Message, kind: LaneKind, entries: int) -> _RecordingTransfer:
        self._diary.append(Operation("post", message, kind))
        return _RecordingTransfer(self._diary, message, kind, self._nothing)

    def send(self, message: Message, kind: LaneKind, tensor: Any, entries: int) -> None:
        self._diary.append(Operation("send", message, kind))

    def complete_sends(self) -> None:
        """Sends are complete at the end of a step."""

    def take_traffic(self) -> None:
        """Nothing was sent."""


class _Recorder(AttnResP2PCommunicator):
    """Our communicator over a recording wire; without the relay, which the plan decides on."""

    def __init__(self, sizes: ScheduleSizes, stage: int, config: TransformerConfig) -> None:
        # Not the base class's, which asks torch.distributed for its peers.
        self.config = config
        self.pp_group = _Group(stage, sizes.pipeline_size)
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size
        self.next_rank = self.prev_rank = None
        # Which hops exist is the same for every model and policy.
        chunks = sizes.pipeline_size * sizes.virtual_size
        self.plan = PipelinePlan((1,) * chunks, sizes.pipeline_size, None)
        self.diary: list[Operation] = []
        self._wire = _RecordingWire(self.diary)
        self._relay = None
        self._expected = {}


def _config(sizes: ScheduleSizes) -> TransformerConfig:
    interleaved = sizes.virtual_size > 1
    overlap = interleaved and sizes.overlap_p2p
    return TransformerConfig(
        num_layers=sizes.pipeline_size * sizes.virtual_size,
        hidden_size=1,
        num_attention_heads=1,
        pipeline_model_parallel_size=sizes.pipeline_size,
        virtual_pipeline_model_parallel_size=sizes.virtual_size if interleaved else None,
        microbatch_group_size_per_vp_stage=sizes.microbatch_group_size,
        pipeline_dtype=torch.float32,
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
    )


def _computations(
    sizes: ScheduleSizes, stage: int, table: ScheduleTable
) -> dict[Direction, Iterator[Operation]]:
    """A stage's forwards and its backwards, each in order."""
    last = sizes.virtual_size - 1

    def chunk(virtual_stage: int) -> int:
        return virtual_stage * sizes.pipeline_size + stage

    return {
        "forward": (Operation("compute", Message("forward", chunk(v), m)) for m, v in table),
        "backward": (
            Operation("compute", Message("backward", chunk(last - v), m)) for m, v in table
        ),
    }


@contextmanager
def _recorded_computations(
    diary: list[Operation], computations: dict[Direction, Iterator[Operation]]
) -> Iterator[None]:
    """Let the schedules' two functions that compute write into the diary instead.

    Megatron-Core takes every group for one rank while torch.distributed is not running; for as long
    as this lasts it is told that it is.
    """
    output, no_tokens = torch.empty(1), torch.zeros([], dtype=torch.int)

    def forward_step(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        diary.append(next(computations["forward"]))
        return output, no_tokens

    def backward_step(*_: Any, **__: Any) -> torch.Tensor:
        diary.append(next(computations["backward"]))
        return output

    replaced = [
        (schedules, "forward_step", forward_step),
        (schedules, "backward_step", backward_step),
        (torch.distributed, "is_initialized", lambda: True),
    ]
    originals = [getattr(place, name) for place, name, _ in replaced]
    try:
        for place, name, stand_in in replaced:
            setattr(place, name, stand_in)
        yield
    finally:
        for (place, name, _), original in zip(replaced, originals, strict=True):
            setattr(place, name, original)
