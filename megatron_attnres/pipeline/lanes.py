"""Lanes: process groups that carry one kind of message, in one direction, over one edge each.

Megatron-Core puts both directions into one group. At P = 2 the next and the previous rank are the
same peer, messages between two peers match first-in first-out, and with V > 1 activations and
gradients cross over. Here every kind of message has a lane per edge of the ring:

- critical and relayed entries use different groups, forward and backward too;
- the edge out of an even pipeline rank and the edge out of an odd one use different groups, so at
  P = 2 the two edges between the same two ranks never share one.

So between two ranks one lane carries messages one way, and the posting order on it is the order
of ``pipeline/messages.py`` on both ends.

Under NCCL every lane has a communicator and a stream of its own: a transfer that waits for its peer
holds up neither compute nor another lane. Relay sends must never block (with V >= 2 a blocking one
can deadlock, a test shows it); ours are waited for at the step's end. Not run here for want of a
GPU: ``tools/check_device.py`` runs all of it on a host with two.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product

import torch
from torch import distributed

from megatron_attnres.pipeline.messages import Direction, LaneKind

KINDS: tuple[LaneKind, ...] = ("critical", "relay")
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
PARITIES = (0, 1)


@dataclass(frozen=True)
class Lanes:
    """The lanes of one pipeline group.

    Attributes:
        group_of: (kind, direction, parity of the sending rank) -> process group.
        ranks: global ranks of the pipeline group, in stage order.
    """

    group_of: dict[tuple[LaneKind, Direction, int], distributed.ProcessGroup]
    ranks: tuple[int, ...]

    def receiver(self, direction: Direction, rank: int) -> int:
        """The pipeline rank to which a rank sends in a direction."""
        return (rank + (1 if direction == "forward" else -1)) % len(self.ranks)

    def sender(self, direction: Direction, rank: int) -> int:
        """The pipeline rank from which a rank receives in a direction."""
        return (rank - (1 if direction == "forward" else -1)) % len(self.ranks)

    def sending(self, kind: LaneKind, direction: Direction, rank: int) -> distributed.ProcessGroup:
        """The lane on which a pipeline rank sends."""
        return self.group_of[kind, direction, rank % 2]

    def receiving(
        self, kind: LaneKind, direction: Direction, rank: int
    ) -> distributed.ProcessGroup:
        """The lane on which a pipeline rank receives."""
        return self.sending(kind, direction, self.sender(direction, rank))

    def warm_up(self, rank: int, device: torch.device) -> None:
        """Send one number over every lane of every edge, one after the other.

        NCCL makes a communicator per pair of ranks at their first transfer. Made on demand, in an
        order that differs between ranks, these can wait for each other for ever; here every rank
        goes through the edges in the same order.
        """
        number = torch.zeros(1, device=device)
        for kind, direction in product(KINDS, DIRECTIONS):
            for sender in range(len(self.ranks)):
                receiver = self.receiver(direction, sender)
                lane = self.sending(kind, direction, sender)
                if rank == sender:
                    distributed.send(number, self.ranks[receiver], group=lane)
                elif rank == receiver:
                    distributed.recv(number, self.ranks[sender], group=lane)


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
            (kind, direction, parity): distributed.new_group(
                list(ranks), timeout=timeout, group_desc=f"{kind} {direction} lane {parity}"
            )
            for kind, direction, parity in product(KINDS, DIRECTIONS, PARITIES)
        }
        if rank in ranks:
            mine = Lanes(groups, tuple(ranks))
    return mine
