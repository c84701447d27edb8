"""Timelines as one JSON file: compact rows out, everything checked on the way in.

A file is an object of ``format``, ``version``, ``layout``, ``clock_error`` and ``steps``. A step
has ``iteration``, ``ranks`` and four lists of rows; times are seconds:

- stages: start, end
- computes: stage, direction, chunk, micro-batch, start, end
- waits: stage, side, direction, hop, micro-batch, kind, start, end
- transfers: direction, hop, micro-batch, kind, bytes, send posted, receive posted, started,
  completed
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial as bind
from pathlib import Path
from typing import Any, TypeVar, get_args

from megatron_attnres.errors import InputError
from megatron_attnres.pipeline.messages import Direction, LaneKind, Message
from megatron_attnres.pipeline.plan import Policy
from megatron_attnres.pipeline.timeline.json_checks import (
    WrongContent,
    read_choice,
    read_field,
    read_index,
    read_list,
    read_row,
    read_seconds,
    read_whole,
)
from megatron_attnres.pipeline.timeline.parts import stage_parts
from megatron_attnres.pipeline.timeline.records import (
    ComputeSpan,
    Side,
    StageSpan,
    StepTimeline,
    TimelineLayout,
    Timelines,
    TransferSpan,
    WaitSpan,
    stage_of,
)

# Of one chunk.
MOST_LAYERS = 100_000
FORMAT = "megatron_attnres timelines"
VERSION = 1

Record = TypeVar("Record")


def write_timelines(path: Path | str, timelines: Timelines) -> None:
    """Write beside and rename, so that a reader never sees half a file.

    Raises:
        OSError: the file cannot be written.
        ValueError: a time that is not finite.
    """
    path = Path(path)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "layout": asdict(timelines.layout),
        "clock_error": timelines.clock_error,
        "steps": [_step_content(step) for step in timelines.steps],
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = path.with_name(path.name + ".writing")
    writing.write_text(text + "\n", encoding="utf-8")
    os.replace(writing, path)


def read_timelines(path: Path | str) -> Timelines:
    """Read what ``write_timelines`` wrote.

    Raises:
        InputError: the file cannot be read, or what it says cannot have happened; the message
            names the file and the place in it.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give a readable file") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {' '.join(str(error).split())}") from None
    try:
        return _timelines(content)
    except WrongContent as error:
        raise InputError(f"{path}: {error}") from None


def _step_content(step: StepTimeline) -> dict[str, Any]:
    return {
        "iteration": step.iteration,
        "ranks": step.ranks,
        "stages": step.stages,
        "computes": step.computes,
        "waits": [
            (wait.stage, wait.side, *wait.message, wait.kind, wait.start, wait.end)
            for wait in step.waits
        ],
        "transfers": [(*transfer.message, *transfer[1:]) for transfer in step.transfers],
    }


def _timelines(content: Any) -> Timelines:
    read_choice(read_field(content, "", "format"), "format", (FORMAT,))
    read_choice(read_field(content, "", "version"), "version", (VERSION,))
    layout = _layout(read_field(content, "", "layout"))
    steps = read_list(read_field(content, "", "steps"), "steps")
    if not steps:
        raise WrongContent("steps is empty")
    clock_error = read_seconds(read_field(content, "", "clock_error"), "clock_error")
    if clock_error < 0:
        raise WrongContent(f"clock_error is {clock_error!r}, below 0")
    return Timelines(
        layout,
        tuple(_step(step, f"steps[{index}]", layout) for index, step in enumerate(steps)),
        clock_error,
    )


def _layout(content: Any) -> TimelineLayout:
    def field(name: str) -> Any:
        return read_field(content, "layout", name)

    def whole(name: str) -> int:
        return read_whole(field(name), f"layout.{name}", 1)

    def flag(name: str) -> bool:
        return read_choice(field(name), f"layout.{name}", (True, False))

    layout = TimelineLayout(
        layers_per_chunk=_layers_per_chunk(field("layers_per_chunk")),
        pipeline_size=whole("pipeline_size"),
        block_size=None if field("block_size") is None else whole("block_size"),
        policy=read_choice(field("policy"), "layout.policy", get_args(Policy)),
        early_relay=flag("early_relay"),
        num_microbatches=whole("num_microbatches"),
        microbatch_group_size=whole("microbatch_group_size"),
        overlap_p2p=flag("overlap_p2p"),
        entry_bytes=whole("entry_bytes"),
    )
    try:
        _ = layout.plan
    except ValueError as error:
        raise WrongContent(f"layout: {error}") from None
    return layout


def _layers_per_chunk(value: Any) -> tuple[int, ...]:
    where = "layout.layers_per_chunk"
    chunks = read_list(value, where)
    layers = tuple(
        read_whole(n, f"{where}[{index}]", 0, MOST_LAYERS) for index, n in enumerate(chunks)
    )
    if sum(layers) == 0:
        raise WrongContent(f"{where} has no layers")
    return layers


def _step(content: Any, where: str, layout: TimelineLayout) -> StepTimeline:
    def records(name: str, columns: int, record: Callable[..., Record]) -> tuple[Record, ...]:
        rows = read_list(read_field(content, where, name), f"{where}.{name}")
        return tuple(
            record(read_row(row, f"{where}.{name}[{index}]", columns), f"{where}.{name}[{index}]")
            for index, row in enumerate(rows)
        )

    ranks = read_list(read_field(content, where, "ranks"), f"{where}.ranks")
    step = StepTimeline(
        iteration=read_whole(read_field(content, where, "iteration"), f"{where}.iteration", 0),
        ranks=tuple(read_whole(rank, f"{where}.ranks", 0) for rank in ranks),
        stages=records("stages", 2, _stage),
        computes=records("computes", 6, bind(_compute, layout=layout)),
        waits=records("waits", 8, bind(_wait, layout=layout)),
        transfers=records("transfers", 9, bind(_transfer, layout=layout)),
    )
    _check_step(step, where, layout.pipeline_size)
    return step


def _check_step(step: StepTimeline, where: str, pipeline_size: int) -> None:
    for name, values in (("ranks", step.ranks), ("stages", step.stages)):
        if len(values) != pipeline_size:
            raise WrongContent(
                f"{where}.{name} has {len(values)} for {pipeline_size} pipeline stages"
            )
    if len(set(step.ranks)) != len(step.ranks):
        raise WrongContent(f"{where}.ranks names a rank twice")
    try:
        stage_parts(step, pipeline_size)
    except ValueError as error:
        raise WrongContent(f"{where}: {error}") from None


def _stage(row: Sequence[Any], where: str) -> StageSpan:
    return StageSpan(*_times(row, where))


def _compute(row: Sequence[Any], where: str, layout: TimelineLayout) -> ComputeSpan:
    span = ComputeSpan(
        read_index(row[0], f"{where}: stage", layout.pipeline_size),
        read_choice(row[1], f"{where}: direction", get_args(Direction)),
        read_index(row[2], f"{where}: chunk", len(layout.layers_per_chunk)),
        read_index(row[3], f"{where}: micro-batch", layout.num_microbatches),
        *_times(row[4:], where),
    )
    if span.chunk % layout.pipeline_size != span.stage:
        raise WrongContent(f"{where}: chunk {span.chunk} is not on stage {span.stage}")
    return span


def _wait(row: Sequence[Any], where: str, layout: TimelineLayout) -> WaitSpan:
    wait = WaitSpan(
        read_index(row[0], f"{where}: stage", layout.pipeline_size),
        read_choice(row[1], f"{where}: side", get_args(Side)),
        _message(row[2:5], where, layout),
        read_choice(row[5], f"{where}: kind", get_args(LaneKind)),
        *_times(row[6:], where),
    )
    expected = stage_of(wait.message, wait.side, layout.pipeline_size)
    if wait.stage != expected:
        raise WrongContent(
            f"{where}: stage is {wait.stage}; {expected} is the message's {wait.side}"
        )
    return wait


def _transfer(row: Sequence[Any], where: str, layout: TimelineLayout) -> TransferSpan:
    return TransferSpan(
        _message(row[:3], where, layout),
        read_choice(row[3], f"{where}: kind", get_args(LaneKind)),
        read_whole(row[4], f"{where}: bytes", 0),
        read_seconds(row[5], f"{where}: send posted"),
        read_seconds(row[6], f"{where}: receive posted"),
        *_times(row[7:], where),
    )


def _message(row: Sequence[Any], where: str, layout: TimelineLayout) -> Message:
    return Message(
        read_choice(row[0], f"{where}: direction", get_args(Direction)),
        read_index(row[1], f"{where}: hop", len(layout.layers_per_chunk) - 1),
        read_index(row[2], f"{where}: micro-batch", layout.num_microbatches),
    )


def _times(row: Sequence[Any], where: str) -> tuple[float, float]:
    start, end = read_seconds(row[0], f"{where}: start"), read_seconds(row[1], f"{where}: end")
    if end < start:
        raise WrongContent(f"{where}: ends at {end!r} s, before its start at {start!r} s")
    return start, end
