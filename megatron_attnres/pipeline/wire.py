"""Where tensors are handed to torch.distributed: posting, counting, completing."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, distributed

from megatron_attnres.pipeline.lanes import Lanes
from megatron_attnres.pipeline.messages import Direction, LaneKind, Message, Side
from megatron_attnres.pipeline.transfer import Transfer
from megatron_attnres.pipeline.waiting import WaitClock


@dataclass
class Traffic:
    """Payload bytes that this rank handed to torch.distributed in one step.

    Attributes:
        bytes_sent: by direction, hop and kind of lane.
    """

    bytes_sent: dict[tuple[Direction, int, LaneKind], int] = field(default_factory=dict)

    def count(self, message: Message, kind: LaneKind, num_bytes: int) -> None:
        """Add one message."""
        key = message.direction, message.hop, kind
        self.bytes_sent[key] = self.bytes_sent.get(key, 0) + num_bytes

    def total(self, direction: Direction) -> int:
        """Bytes sent in one direction over all hops and lanes."""
        return sum(size for (way, _, _), size in self.bytes_sent.items() if way == direction)


Post = Callable[[], distributed.Work]


class TransferObserver(Protocol):
    """Someone who wants to know of every transfer: the profiler."""

    def posted(
        self,
        message: Message,
        kind: LaneKind,
        num_bytes: int,
        side: Side,
        post: Post,
    ) -> distributed.Work:
        """Post the transfer; the request that is returned is the one that is waited for."""
        ...


class Wire:
    """One pipeline rank's end of all its lanes.

    Sends are not waited for when they are posted: a stage would wait until its neighbour has read.
    They are completed at the latest by ``complete_sends``.

    Args:
        lanes: of the pipeline group.
        rank: pipeline rank.
        entry_shape: of one entry, [s, b, h] (s / TP under sequence parallelism).
        dtype: of entries.
        device: of receive buffers.

    Attributes:
        waits: how long this rank stood still for transfers.
    """

    def __init__(
        self,
        lanes: Lanes,
        rank: int,
        entry_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._lanes = lanes
        self._rank = rank
        self._entry_shape = entry_shape
        self._dtype = dtype
        self._device = device
        self.waits = WaitClock(device)
        self._outbox: deque[Transfer] = deque()
        self._traffic = Traffic()
        self._observer: TransferObserver | None = None

    def observe(self, observer: TransferObserver | None) -> None:
        """Let someone see every transfer from now on; None ends it."""
        self._observer = observer

    def resize(self, entry_shape: tuple[int, int, int]) -> None:
        """Carry entries of another shape from now on; all ranks must say so between two steps.

        Raises:
            RuntimeError: a send of the old shape is under way.
        """
        if self._outbox:
            raise RuntimeError(f"{self._outbox[0].message} is under way; resize between steps")
        self._entry_shape = entry_shape

    def receive(self, message: Message, kind: LaneKind, entries: int) -> Transfer:
        """Post the receive of a stack of entries, [entries, s, b, h]."""
        buffer = torch.empty((entries, *self._entry_shape), dtype=self._dtype, device=self._device)
        peer = self._lanes.ranks[self._lanes.sender(message.direction, self._rank)]
        lane = self._lanes.receiving(kind, message.direction, self._rank)

        post = partial(distributed.irecv, buffer, peer, group=lane)
        seen = self._in_sight(message, kind, buffer, "receive", post)
        return Transfer(message, kind, peer, buffer, seen, sending=False, waits=self.waits)

    def send(self, message: Message, kind: LaneKind, tensor: Tensor, entries: int) -> None:
        """Post the send of a stack of entries.

        Raises:
            RuntimeError: the tensor is not what the plan says crosses.
        """
        planned = (entries, *self._entry_shape)
        if tuple(tensor.shape) != planned:
            raise RuntimeError(
                f"{message}, {kind} lane: the tensor to send is {tuple(tensor.shape)}, the plan "
                f"says {planned}"
            )
        # An alias of its own: the schedule drops an output tensor's storage after its send.
        payload = tensor.detach().contiguous()
        peer = self._lanes.ranks[self._lanes.receiver(message.direction, self._rank)]
        lane = self._lanes.sending(kind, message.direction, self._rank)

        post = partial(distributed.isend, payload, peer, group=lane)
        seen = self._in_sight(message, kind, payload, "send", post)
        transfer = Transfer(message, kind, peer, payload, seen, sending=True, waits=self.waits)
        self._traffic.count(message, kind, payload.nbytes)
        self._drop_completed()
        self._outbox.append(transfer)

    def complete_sends(self) -> None:
        """Wait for every send that is still under way."""
        while self._outbox:
            self._outbox.popleft().wait()

    def take_traffic(self) -> Traffic:
        """The bytes counted since the last call."""
        traffic, self._traffic = self._traffic, Traffic()
        return traffic

    def _in_sight(
        self, message: Message, kind: LaneKind, tensor: Tensor, side: Side, post: Post
    ) -> Post:
        """What posts a transfer, in sight of the observer if there is one."""
        if self._observer is None:
            return post
        return partial(self._observer.posted, message, kind, tensor.nbytes, side, post)

    def _drop_completed(self) -> None:
        """Let go of the oldest sends that are over; later ones are looked at later."""
        while self._outbox and self._outbox[0].is_completed():
            # Returns at once, or raises what went wrong.
            self._outbox.popleft().wait()
