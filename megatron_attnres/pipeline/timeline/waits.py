"""What a stage waited for: the other end's work, or the transfer.

A wait is cut at the moment the other end posted the transfer. Before it there was nothing to
transfer yet: pipeline bubble. After it the transfer was under way, or queued behind another one on
its lane: exposed communication.
"""

from collections.abc import Iterable
from typing import NamedTuple

from megatron_attnres.pipeline.messages import LaneKind, Message
from megatron_attnres.pipeline.timeline.records import (
    ComputeSpan,
    StepTimeline,
    TransferSpan,
    WaitSpan,
    stage_of,
)


class CutWait(NamedTuple):
    """A wait and where it is cut.

    Attributes:
        wait: the wait.
        cut: when the other end had posted, within the wait, seconds.
    """

    wait: WaitSpan
    cut: float

    @property
    def bubble(self) -> float:
        """Seconds before the other end had posted."""
        return self.cut - self.wait.start

    @property
    def exposed(self) -> float:
        """Seconds after the other end had posted."""
        return self.wait.end - self.cut


def cut_waits(timeline: StepTimeline, pipeline_size: int) -> tuple[CutWait, ...]:
    """All waits of a step, each cut where the other end posted.

    Raises:
        ValueError: a transfer that occurs twice; a wait for none, or at a stage that is not that
            end of it.
    """
    transfers = _transfers_by_lane(timeline.transfers)
    return tuple(_cut(wait, transfers, pipeline_size) for wait in timeline.waits)


def span_name(span: ComputeSpan | WaitSpan) -> str:
    """A span for an error message."""
    if isinstance(span, WaitSpan):
        what = f"wait for {span.message}, {span.kind},"
    else:
        what = f"{span.direction} of chunk {span.chunk} for micro-batch {span.microbatch},"
    return f"stage {span.stage}: {what} {span.start:.9f} s to {span.end:.9f} s"


def _transfers_by_lane(
    transfers: Iterable[TransferSpan],
) -> dict[tuple[Message, LaneKind], TransferSpan]:
    by_lane: dict[tuple[Message, LaneKind], TransferSpan] = {}
    for transfer in transfers:
        key = transfer.message, transfer.kind
        if key in by_lane:
            raise ValueError(f"{transfer.message}, {transfer.kind}, is transferred twice")
        by_lane[key] = transfer
    return by_lane


def _cut(
    wait: WaitSpan,
    transfers: dict[tuple[Message, LaneKind], TransferSpan],
    pipeline_size: int,
) -> CutWait:
    transfer = transfers.get((wait.message, wait.kind))
    if transfer is None:
        raise ValueError(f"{span_name(wait)} has no transfer")
    if wait.stage != stage_of(wait.message, wait.side, pipeline_size):
        raise ValueError(f"{span_name(wait)} is not where that message's {wait.side} is")
    posted = transfer.send_posted if wait.side == "receive" else transfer.receive_posted
    return CutWait(wait, min(max(posted, wait.start), wait.end))
