"""Point-to-point communication of ours under Megatron-Core's schedules."""

from collections import deque
from dataclasses import dataclass, field

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor, distributed

from megatron_attnres.pipeline.lanes import Lanes
from megatron_attnres.pipeline.messages import (
    Direction,
    Message,
    ScheduleTable,
    backward_receives,
    backward_sends,
    forward_receives,
    forward_sends,
)
from megatron_attnres.pipeline.plan import PipelinePlan
from megatron_attnres.pipeline.transfer import Transfer


@dataclass
class Traffic:
    """Payload bytes that this rank handed to torch.distributed in one step.

    Attributes:
        bytes_by_hop: by direction and hop.
    """

    bytes_by_hop: dict[tuple[Direction, int], int] = field(default_factory=dict)

    def count(self, message: Message, num_bytes: int) -> None:
        """Add one message."""
        key = message.direction, message.hop
        self.bytes_by_hop[key] = self.bytes_by_hop.get(key, 0) + num_bytes

    def total(self, direction: Direction) -> int:
        """Bytes sent in one direction over all hops."""
        return sum(size for (way, _), size in self.bytes_by_hop.items() if way == direction)


class AttnResP2PCommunicator(P2PCommunicator):
    """Sizes every transfer from the plan, gives every direction its lane, counts what it sends.

    Every public method of Megatron-Core's communicator goes through ``_communicate``; this class
    overrides that one. A step is bracketed by ``begin_step`` and ``end_step``.

    Sends are not waited for when they are posted: a blocking schedule would make a stage wait
    until its neighbour has read. They are completed at the latest by ``end_step``.

    Args:
        pp_group: pipeline group.
        config: Megatron-Core's configuration.
        plan: the pipeline plan.
        lanes: of this pipeline group.
        entry_shape: of one entry, [s, b, h] (s / TP under sequence parallelism).
        device: of receive buffers.
    """

    def __init__(
        self,
        pp_group: distributed.ProcessGroup,
        config: ModelParallelConfig,
        plan: PipelinePlan,
        lanes: Lanes,
        entry_shape: tuple[int, int, int],
        device: torch.device,
    ) -> None:
        super().__init__(pp_group, config)
        self.plan = plan
        self.lanes = lanes
        self.entry_shape = entry_shape
        self.device = device
        self._expected: dict[str, deque[Message]] = {}
        self._outbox: list[Transfer] = []
        self._traffic = Traffic()

    def begin_step(self, table: ScheduleTable, forward_only: bool) -> None:
        """Derive the step's messages, in order, from Megatron-Core's schedule table."""
        rank = self.pp_group.rank()
        backward_table = () if forward_only else table
        self._expected = {
            "forward send": deque(forward_sends(self.plan, rank, table)),
            "forward receive": deque(forward_receives(self.plan, rank, table)),
            "backward send": deque(backward_sends(self.plan, rank, backward_table)),
            "backward receive": deque(backward_receives(self.plan, rank, backward_table)),
        }
        self._traffic = Traffic()

    def end_step(self) -> Traffic:
        """Complete what is still under way and hand out the step's byte counts.

        Raises:
            RuntimeError: the schedule left a planned message out.
        """
        while self._outbox:
            self._outbox.pop().wait()
        for kind, messages in self._expected.items():
            if messages:
                raise RuntimeError(f"the step ended before its {kind} of {messages[0]}")
        return self._traffic

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: object,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, dict[str, Transfer] | None]:
        """Post what the schedule asks for; the plan, not ``tensor_shape``, gives the sizes.

        Returns:
            What is received from the previous rank, from the next rank, and, unless waited for
            here, the receives' transfers under Megatron-Core's names.
        """
        receives: dict[str, Transfer] = {}
        from_prev = from_next = None
        if recv_prev:
            from_prev, receives["recv_prev"] = self._receive("forward", self.prev_rank)
        if recv_next:
            from_next, receives["recv_next"] = self._receive("backward", self.next_rank)
        if tensor_send_next is not None:
            self._send("forward", tensor_send_next, self.next_rank)
        if tensor_send_prev is not None:
            self._send("backward", tensor_send_prev, self.prev_rank)
        if not wait_on_reqs:
            return from_prev, from_next, receives
        for transfer in receives.values():
            transfer.wait()
        return from_prev, from_next, None

    def _receive(self, direction: Direction, peer: int) -> tuple[Tensor, Transfer]:
        message = self._next(f"{direction} receive")
        buffer = torch.empty(
            self._shape(message), dtype=self.config.pipeline_dtype, device=self.device
        )
        lane = self.lanes.receiving(direction, self.pp_group.rank())
        request = distributed.irecv(buffer, peer, group=lane)
        return buffer.requires_grad_(), Transfer(message, peer, buffer, request, sending=False)

    def _send(self, direction: Direction, tensor: Tensor, peer: int) -> None:
        message = self._next(f"{direction} send")
        if tuple(tensor.shape) != self._shape(message):
            raise RuntimeError(
                f"{message}: the tensor to send is {tuple(tensor.shape)}, the plan says "
                f"{self._shape(message)}"
            )
        # An alias of its own: the schedule drops the output tensor's storage after this call.
        payload = tensor.detach().contiguous()
        lane = self.lanes.sending(direction, self.pp_group.rank())
        request = distributed.isend(payload, peer, group=lane)
        self._traffic.count(message, payload.numel() * payload.element_size())
        self._outbox = [transfer for transfer in self._outbox if not transfer.is_completed()]
        self._outbox.append(Transfer(message, peer, payload, request, sending=True))

    def _next(self, kind: str) -> Message:
        messages = self._expected.get(kind)
        if not messages:
            raise RuntimeError(f"the schedule asks for a {kind} that the plan does not have")
        return messages.popleft()

    def _shape(self, message: Message) -> tuple[int, ...]:
        return (self.plan.hops[message.hop].entries, *self.entry_shape)
