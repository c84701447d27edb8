"""Point-to-point communication of ours under Megatron-Core's schedules."""

from collections import deque

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor, distributed

from megatron_attnres.pipeline.messages import (
    Direction,
    Message,
    ScheduleTable,
    backward_receives,
    backward_sends,
    forward_receives,
    forward_sends,
    lane_entries,
)
from megatron_attnres.pipeline.plan import PipelinePlan
from megatron_attnres.pipeline.relay import RelayExchange
from megatron_attnres.pipeline.transfer import Transfer
from megatron_attnres.pipeline.waiting import WaitClock
from megatron_attnres.pipeline.wire import Traffic, TransferObserver, Wire


class AttnResP2PCommunicator(P2PCommunicator):
    """Sizes every transfer from the plan and gives every message its lane.

    Every public method of Megatron-Core's communicator goes through ``_communicate``; this class
    overrides that one. A step is bracketed by ``begin_step`` and ``end_step``.

    Args:
        pp_group: pipeline group.
        config: Megatron-Core's configuration.
        plan: the pipeline plan.
        wire: this rank's end of the lanes.
        relay: of this rank; None packs relayed entries with the critical ones.
    """

    def __init__(
        self,
        pp_group: distributed.ProcessGroup,
        config: ModelParallelConfig,
        plan: PipelinePlan,
        wire: Wire,
        relay: RelayExchange | None,
    ) -> None:
        super().__init__(pp_group, config)
        self.plan = plan
        self._wire = wire
        self._relay = relay
        self._expected: dict[str, deque[Message]] = {}

    @property
    def waits(self) -> WaitClock:
        """How long this rank stood still for transfers."""
        return self._wire.waits

    def observe(self, observer: TransferObserver | None) -> None:
        """Let someone see every transfer from now on; None ends it."""
        self._wire.observe(observer)

    def resize(self, entry_shape: tuple[int, int, int]) -> None:
        """Carry entries of another shape from now on; see ``Wire.resize``."""
        self._wire.resize(entry_shape)

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

    def end_step(self) -> Traffic:
        """Complete what is still under way and hand out the step's byte counts.

        Raises:
            RuntimeError: a planned message was left out; names it.
        """
        self._wire.complete_sends()
        for kind, messages in self._expected.items():
            if messages:
                raise RuntimeError(f"the step ended before its {kind} of {messages[0]}")
        if self._relay is not None:
            self._relay.check_empty()
        return self._wire.take_traffic()

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
        if recv_prev:
            receives["recv_prev"] = self._receive("forward")
        if recv_next:
            receives["recv_next"] = self._receive("backward")
        if tensor_send_next is not None:
            self._send("forward", tensor_send_next)
        if tensor_send_prev is not None:
            self._send("backward", tensor_send_prev)
        from_prev, from_next = (
            receives[name].tensor if name in receives else None
            for name in ("recv_prev", "recv_next")
        )
        if not wait_on_reqs:
            return from_prev, from_next, receives
        for transfer in receives.values():
            transfer.wait()
        return from_prev, from_next, None

    def _receive(self, direction: Direction) -> Transfer:
        message = self._next(f"{direction} receive")
        transfer = self._wire.receive(message, "critical", self._entries(message))
        transfer.tensor.requires_grad_()
        if self._relay is not None:
            self._relay.post_receive(message)
        return transfer

    def _send(self, direction: Direction, tensor: Tensor) -> None:
        message = self._next(f"{direction} send")
        self._wire.send(message, "critical", tensor, self._entries(message))
        if self._relay is not None and direction == "backward":
            self._relay.send_gradients(message)

    def _next(self, kind: str) -> Message:
        messages = self._expected.get(kind)
        if not messages:
            raise RuntimeError(f"the schedule asks for a {kind} that the plan does not have")
        return messages.popleft()

    def _entries(self, message: Message) -> int:
        return lane_entries(self.plan.hops[message.hop], "critical", self._relay is not None)
