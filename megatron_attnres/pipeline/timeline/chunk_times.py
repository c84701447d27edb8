"""How long every chunk took, from timelines: what a prediction of the same layout starts from."""

from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from megatron_attnres.pipeline.messages import Direction
from megatron_attnres.pipeline.timeline.parts import stage_parts
from megatron_attnres.pipeline.timeline.records import StepTimeline, Timelines, WaitSpan


class ChunkSeconds(NamedTuple):
    """Times for one micro-batch, by chunk, in seconds."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


def chunk_seconds(timelines: Timelines) -> ChunkSeconds:
    """Of every chunk and direction, the median over micro-batches, steps and pipelines.

    Waits inside a computation do not count. The time between computations, in which a stage runs
    the schedule's code, does: every computation gets its share.

    Raises:
        ValueError: a chunk that never ran; names it.
    """
    seconds: dict[tuple[Direction, int], list[float]] = defaultdict(list)
    for step in timelines.steps:
        waited = _waits_of_stages(step)
        for span in step.computes:
            inside = waited(span.stage, span.start, span.end)
            seconds[span.direction, span.chunk].append(span.end - span.start - inside)

    def of_all(direction: Direction) -> tuple[float, ...]:
        chunks = range(len(timelines.layout.layers_per_chunk))
        missing = [chunk for chunk in chunks if not seconds[direction, chunk]]
        if missing:
            raise ValueError(f"has no {direction} of chunk {missing[0]}")
        return tuple(median(seconds[direction, chunk]) + between for chunk in chunks)

    between = _host_seconds(timelines)
    return ChunkSeconds(of_all("forward"), of_all("backward"))


def _host_seconds(timelines: Timelines) -> float:
    """Time between computations that is no wait, per computation; median over the steps."""
    size = timelines.layout.pipeline_size
    shares = [
        sum(parts.host for parts in stage_parts(step, size)) / len(step.computes)
        for step in timelines.steps
        if step.computes
    ]
    return median(shares) if shares else 0.0


def _waits_of_stages(step: StepTimeline) -> Callable[[int, float, float], float]:
    """How long a stage waited between two times."""
    waits: dict[int, list[WaitSpan]] = defaultdict(list)
    for wait in step.waits:
        waits[wait.stage].append(wait)

    def waited(stage: int, start: float, end: float) -> float:
        return sum(max(0.0, min(end, w.end) - max(start, w.start)) for w in waits[stage])

    return waited
