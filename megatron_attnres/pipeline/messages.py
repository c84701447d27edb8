"""Which message is the next one on each lane: pure functions of the plan and the schedule table.

No index travels on the wire. Both ends of a hop derive the same order from Megatron-Core's
schedule table, which lists (micro-batch, virtual stage) in the order of every rank's forwards;
backwards follow the same table with the virtual stages reversed.

Posting order, on every lane of every edge: the sender posts in the order in which it runs its
chunks, the receiver posts in the order in which its neighbour sends. That holds for the critical
lanes, where Megatron-Core's schedule asks for each transfer, and for the relay lanes, which follow
them: a relay receive is posted together with the critical receive of the same message, a relay send
when its chunk starts (forward) or right after the critical gradient (backward). Both are the order
of the critical messages with those left out that relay nothing.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from megatron_attnres.pipeline.plan import HopPlan, PipelinePlan

Direction = Literal["forward", "backward"]
LaneKind = Literal["critical", "relay"]
Side = Literal["send", "receive"]
ScheduleTable = Sequence[tuple[int, int]]


class Message(NamedTuple):
    """One transfer between neighbouring ranks.

    Attributes:
        direction: activations forward, gradients backward.
        hop: crosses between chunk ``hop`` and chunk ``hop + 1``.
        microbatch: index within the step.
    """

    direction: Direction
    hop: int
    microbatch: int

    def __str__(self) -> str:
        start, end = self.hop, self.hop + 1
        if self.direction == "backward":
            start, end = end, start
        return f"{self.direction} hop {start}-{end} of micro-batch {self.microbatch}"


def lane_entries(hop: HopPlan, kind: LaneKind, early_relay: bool) -> int:
    """Entries of one message over a hop, the partial sum included; 0 where the lane carries none.

    Without early relay the critical lane carries all of them.
    """
    relayed = len(hop.relayed) if early_relay else 0
    return relayed if kind == "relay" else hop.entries - relayed


def forward_sends(plan: PipelinePlan, rank: int, table: ScheduleTable) -> list[Message]:
    """What a pipeline rank sends downstream in one step, in order."""
    last_hop = len(plan.hops)
    chunks = [(microbatch, _chunk(plan, rank, stage)) for microbatch, stage in table]
    return [Message("forward", chunk, m) for m, chunk in chunks if chunk < last_hop]


def forward_receives(plan: PipelinePlan, rank: int, table: ScheduleTable) -> list[Message]:
    """What a pipeline rank receives from upstream in one step, in order."""
    return forward_sends(plan, (rank - 1) % plan.pipeline_size, table)


def backward_sends(plan: PipelinePlan, rank: int, table: ScheduleTable) -> list[Message]:
    """What a pipeline rank sends upstream in one step, in order."""
    last_stage = plan.virtual_size - 1
    chunks = [(microbatch, _chunk(plan, rank, last_stage - stage)) for microbatch, stage in table]
    return [Message("backward", chunk - 1, m) for m, chunk in chunks if chunk > 0]


def backward_receives(plan: PipelinePlan, rank: int, table: ScheduleTable) -> list[Message]:
    """What a pipeline rank receives from downstream in one step, in order."""
    return backward_sends(plan, (rank + 1) % plan.pipeline_size, table)


def _chunk(plan: PipelinePlan, rank: int, virtual_stage: int) -> int:
    return virtual_stage * plan.pipeline_size + rank
