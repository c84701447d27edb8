"""What every chunk takes, from timelines: medians without waits, plus the host's time."""

from dataclasses import replace

import pytest

from megatron_attnres.pipeline.messages import Message
from megatron_attnres.pipeline.timeline.chunk_times import chunk_seconds
from megatron_attnres.pipeline.timeline.records import (
    ComputeSpan,
    StageSpan,
    StepTimeline,
    TimelineLayout,
    Timelines,
    TransferSpan,
    WaitSpan,
)

MESSAGE = Message("forward", 1, 0)


def profile(*forwards, backward=(90, 92), waits=()):
    """Stage 0's forwards of chunk 0 between given times and a backward; stage 1 does the same."""
    layout = TimelineLayout((1, 1), 2, None, "cached", True, len(forwards), 1, True, 1)
    computes = [
        ComputeSpan(stage, direction, stage, index, *times)
        for stage in (0, 1)
        for direction, spans in (("forward", forwards), ("backward", [backward]))
        for index, times in enumerate(spans)
    ]
    covered = (StageSpan(min(forwards)[0], backward[1]),) * 2
    transfer = TransferSpan(Message("forward", 0, 0), "critical", 1, 0, 0, 0, 0)
    step = StepTimeline(1, (0, 1), covered, tuple(computes), waits, (transfer,))
    return Timelines(layout, (step,))


def test_medians_over_micro_batches():
    found = chunk_seconds(profile((0, 1), (1, 4), (4, 13), backward=(13, 15)))
    assert found == ((3, 3), (2, 2))


def test_time_between_computations_is_shared_by_them():
    # Two computations a stage, 88 seconds between them.
    found = chunk_seconds(profile((0, 2)))
    assert found.forward == (2 + 44, 2 + 44)
    assert found.backward == (2 + 44, 2 + 44)


def test_waits_are_neither_computing_nor_the_hosts():
    waits = (
        WaitSpan(1, "receive", Message("forward", 0, 0), "critical", 1, 3),  # inside
        WaitSpan(1, "receive", Message("forward", 0, 0), "critical", 10, 90),  # between
    )
    found = chunk_seconds(profile((0, 10), waits=waits))
    # Stage 0 has 80 seconds of host time, stage 1 none: 20 for each of four computations.
    assert found.forward == (10 + 20, 8 + 20)


def test_a_chunk_that_never_ran_is_named():
    timelines = profile((0, 1))
    more = replace(timelines.layout, layers_per_chunk=(1, 1, 1, 1))
    with pytest.raises(ValueError, match="no forward of chunk 2"):
        chunk_seconds(replace(timelines, layout=more))
