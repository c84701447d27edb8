"""Lanes: process groups that carry one kind of message, in one direction, over one edge each.

Megatron-Core puts both directions into one group. At P = 2 the next and the previous rank are the
same peer, messages between two peers match first-in first-out, and with V > 1 activations and
gradients cross over. Here every message kind has a lane per edge of the ring:

- the edge out of an even pipeline rank and the edge out of an odd one use different groups, so at
  P = 2 the two edges between the same two ranks never share one;
- forward and backward use different groups.

So between two ranks one lane carries messages one way, and the posting order on it is the order
of ``pipeline/messages.py`` on both ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch import distributed

from megatron_attnres.pipeline.messages import Direction

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Lanes:
    """The lanes of one pipeline group.

    Attributes:
        group_of: (direction, parity of the sending rank's edge) -> process group.
        size: P.
    """

    group_of: dict[tuple[Direction, int], distributed.ProcessGroup]
    size: int

    def sending(self, direction: Direction, rank: int) -> distributed.ProcessGroup:
        """The lane on which a pipeline rank sends in a direction."""
        return self.group_of[direction, rank % 2]

    def receiving(self, direction: Direction, rank: int) -> distributed.ProcessGroup:
        """The lane on which a pipeline rank receives in a direction."""
        sender = rank - 1 if direction == "forward" else rank + 1
        return self.sending(direction, sender % self.size)


def create_lanes(
    pipeline_groups: Sequence[Sequence[int]], rank: int, timeout: timedelta
) -> Lanes | None:
    """Make the lanes of every pipeline group. Collective over all ranks of the job.

    Args:
        pipeline_groups: global ranks of every pipeline group of the job, in stage order.
        rank: this process's global rank.
        timeout: after which a transfer fails instead of hanging.

    Returns:
        This rank's lanes; None if its pipeline has a single stage.
    """
    mine = None
    for ranks in pipeline_groups:
        if len(ranks) == 1:
            continue
        # Every rank takes part in the creation of every group, in the same order.
        groups = {
            (direction, parity): distributed.new_group(
                list(ranks),
                timeout=timeout,
                group_desc=f"{direction} lane {'odd' if parity else 'even'}",
            )
            for direction in DIRECTIONS
            for parity in (0, 1)
        }
        if rank in ranks:
            mine = Lanes(groups, len(ranks))
    return mine
