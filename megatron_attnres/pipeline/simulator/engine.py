"""Plays the stages' programs against each other over a network, event by event. No torch.

A stage works off its operations; a computation takes its time, a wait lasts until the message has
arrived. A transfer starts when both ends have posted it and its lane is free: a lane carries its
messages one after the other. Transfers that leave one rank, or reach one, at the same time share
that rank's link evenly where the network says so; each then runs at the smaller of its two shares.

Times may be floats or exact numbers (integers, fractions).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, count
from typing import Any

from megatron_attnres.pipeline.messages import Direction, LaneKind, Message
from megatron_attnres.pipeline.simulator.network import Network
from megatron_attnres.pipeline.simulator.operations import Operation
from megatron_attnres.pipeline.timeline.records import (
    ComputeSpan,
    StageSpan,
    StepTimeline,
    TransferSpan,
    WaitSpan,
    stage_of,
)

ComputeSeconds = Callable[[Direction, int], Any]
MessageBytes = Callable[[Message, LaneKind], int]


@dataclass(slots=True, eq=False)
class _Transfer:
    """One message on its lane."""

    message: Message
    kind: LaneKind
    num_bytes: int
    lane: "_Lane"
    send_posted: Any = None
    receive_posted: Any = None
    started: Any = None
    # Known as soon as the last byte has left.
    completed: Any = None
    # While it runs: bytes left at ``updated``, the rate since then; events of older rates are void.
    left: Any = 0
    rate: Any = 0
    updated: Any = 0
    version: int = 0
    # Stages that wait for its end, and since when.
    waiters: "tuple[tuple[_Stage, Any], ...]" = ()


# The transfers that leave, or reach, a rank over one link at the moment, in order of their start.
_Port = dict[_Transfer, None]


@dataclass(slots=True)
class _Lane:
    """Messages of one kind and direction over one edge: one runs, the others queue."""

    sender: int
    receiver: int
    leaving: _Port
    arriving: _Port
    bytes_per_second: Any
    latency: Any
    queue: "deque[_Transfer]" = field(default_factory=deque)
    running: "_Transfer | None" = None


# What to do, and to which transfer; of a computation its message and seconds.
_Step = tuple[str, Any]


@dataclass(slots=True)
class _Stage:
    """How far a stage is in its program."""

    index: int
    program: list[_Step]
    position: int = 0
    end: Any = 0
    waits_for: _Transfer | None = None


class Simulation:
    """One step of one pipeline.

    Args:
        programs: of every stage.
        network: its links.
        compute_seconds: of a direction and chunk.
        message_bytes: of a message on a lane; the same for every micro-batch.
    """

    def __init__(
        self,
        programs: Sequence[Sequence[Operation]],
        network: Network,
        compute_seconds: ComputeSeconds,
        message_bytes: MessageBytes,
    ) -> None:
        self._network = network
        self._size = len(programs)
        self._ports: dict[tuple[int, str, bool], _Port] = {}
        self._lanes: dict[tuple[int, int, Direction, LaneKind], _Lane] = {}
        self._hops: dict[tuple[Direction, int, LaneKind], tuple[_Lane, int]] = {}
        self._transfers: dict[tuple[Message, LaneKind], _Transfer] = {}
        self._events: list[tuple[Any, int, Callable[..., None], Any, int]] = []
        self._order = count()
        self._computes: list[ComputeSpan] = []
        self._waits: list[WaitSpan] = []
        self._message_bytes = message_bytes
        seconds = {
            (direction, chunk): compute_seconds(direction, chunk)
            for direction, chunk in {
                (operation.message.direction, operation.message.hop)
                for program in programs
                for operation in program
                if operation.what == "compute"
            }
        }
        self._stages = [
            _Stage(index, self._resolve(program, seconds)) for index, program in enumerate(programs)
        ]

    def run(self) -> StepTimeline:
        """The step's timeline.

        Raises:
            RuntimeError: stages wait for each other for ever; names one of the messages.
        """
        self.run_to_end()
        return StepTimeline(
            iteration=0,
            ranks=tuple(range(self._size)),
            stages=tuple(StageSpan(0, stage.end) for stage in self._stages),
            computes=tuple(self._computes),
            waits=tuple(self._waits),
            transfers=tuple(
                TransferSpan(
                    t.message,
                    t.kind,
                    t.num_bytes,
                    t.send_posted,
                    t.receive_posted,
                    t.started,
                    t.completed,
                )
                for t in self._transfers.values()
            ),
        )

    def run_to_end(self) -> Any:
        """Only the step's seconds: a timeline takes as long to write down as to play.

        Raises:
            RuntimeError: see ``run``.
        """
        for stage in self._stages:
            self._at(0, self._advance, stage)
        events = self._events
        while events:
            time, _, happen, subject, version = heappop(events)
            happen(subject, time, version)
        self._check_all_ended()
        return max(stage.end for stage in self._stages)

    def _resolve(
        self, program: Sequence[Operation], seconds: dict[tuple[Direction, int], Any]
    ) -> list[_Step]:
        """The program over transfers; at its end the stage waits for the last send of each lane."""
        steps, last_sends = [], {}
        transfers = self._transfers
        for what, message, kind in program:
            if kind is None:
                steps.append((what, (message, seconds[message.direction, message.hop])))
                continue
            key = message, kind
            transfer = transfers.get(key)
            if transfer is None:
                transfer = transfers[key] = self._transfer(message, kind)
            steps.append((what, transfer))
            if what == "send":
                last_sends[id(transfer.lane)] = transfer
        return steps + [("complete", transfer) for transfer in last_sends.values()]

    def _transfer(self, message: Message, kind: LaneKind) -> _Transfer:
        direction, hop, _ = message
        key = direction, hop, kind
        lane_and_bytes = self._hops.get(key)
        if lane_and_bytes is None:
            lane = self._lane_of(message, kind)
            lane_and_bytes = self._hops[key] = lane, self._message_bytes(message, kind)
        lane, num_bytes = lane_and_bytes
        return _Transfer(message, kind, num_bytes, lane)

    def _lane_of(self, message: Message, kind: LaneKind) -> _Lane:
        sender = stage_of(message, "send", self._size)
        receiver = stage_of(message, "receive", self._size)
        key = sender, receiver, message.direction, kind
        if key not in self._lanes:
            self._lanes[key] = self._lane(sender, receiver)
        return self._lanes[key]

    def _lane(self, sender: int, receiver: int) -> _Lane:
        inside = self._network.is_inside(sender, receiver)
        link = self._network.link(sender, receiver)
        leaving = self._ports.setdefault((sender, "out", inside), {})
        arriving = self._ports.setdefault((receiver, "in", inside), {})
        return _Lane(sender, receiver, leaving, arriving, link.bytes_per_second, link.latency)

    def _at(self, time: Any, happen: Callable[..., None], subject: Any, version: int = 0) -> None:
        # The running number keeps events of one time in the order in which they were planned.
        heappush(self._events, (time, next(self._order), happen, subject, version))

    def _advance(self, stage: _Stage, time: Any, _: int = 0) -> None:
        """Let a stage go on until it computes, has to wait or is through."""
        program = stage.program
        for position in range(stage.position, len(program)):
            what, target = program[position]
            if what == "post":
                target.receive_posted = time
                if target.send_posted is not None:
                    self._start_next(target.lane, time)
            elif what == "send":
                target.send_posted = time
                target.lane.queue.append(target)
                if target.receive_posted is not None:
                    self._start_next(target.lane, time)
            elif what == "compute":
                (direction, chunk, microbatch), seconds = target
                end = time + seconds
                self._computes.append(
                    ComputeSpan(stage.index, direction, chunk, microbatch, time, end)
                )
                stage.position = position + 1
                self._at(end, self._advance, stage)
                return
            elif target.completed is None or target.completed > time:
                stage.position = position + 1
                self._wait(stage, target, time)
                return
        stage.position = len(program)
        stage.end = time

    def _wait(self, stage: _Stage, transfer: _Transfer, time: Any) -> None:
        if transfer.completed is None:
            stage.waits_for = transfer
            transfer.waiters += ((stage, time),)
        else:
            self._end_wait(stage, transfer, time)

    def _end_wait(self, stage: _Stage, transfer: _Transfer, since: Any) -> None:
        """Let the stage go on when the transfer's last byte, on its way already, arrives."""
        side = "send" if stage.index == transfer.lane.sender else "receive"
        until = transfer.completed
        self._waits.append(
            WaitSpan(stage.index, side, transfer.message, transfer.kind, since, until)
        )
        self._at(until, self._advance, stage)

    def _start_next(self, lane: _Lane, time: Any) -> None:
        """Start the lane's oldest message if the lane is free and its receiver is ready."""
        queue = lane.queue
        if not queue or lane.running is not None or queue[0].receive_posted is None:
            return
        transfer = lane.running = queue.popleft()
        transfer.started = transfer.updated = time
        if not self._network.shared:
            self._at(time + transfer.num_bytes / lane.bytes_per_second, self._drained, transfer)
            return
        transfer.left = transfer.num_bytes
        lane.leaving[transfer] = lane.arriving[transfer] = None
        self._share(lane, time)

    def _share(self, lane: _Lane, time: Any) -> None:
        """Give every transfer that meets this lane's at a rank its share of the link."""
        for transfer in chain(lane.leaving, lane.arriving):
            its = transfer.lane
            rate = its.bytes_per_second / max(len(its.leaving), len(its.arriving))
            if rate == transfer.rate:
                continue
            transfer.left -= transfer.rate * (time - transfer.updated)
            transfer.updated, transfer.rate = time, rate
            transfer.version += 1
            self._at(time + transfer.left / rate, self._drained, transfer, transfer.version)

    def _drained(self, transfer: _Transfer, time: Any, version: int) -> None:
        """The last byte has left: the lane is free."""
        if version != transfer.version:
            return
        lane = transfer.lane
        lane.running = None
        if self._network.shared:
            del lane.leaving[transfer], lane.arriving[transfer]
            self._share(lane, time)
        transfer.completed = time + lane.latency
        waiters, transfer.waiters = transfer.waiters, ()
        for stage, since in waiters:
            stage.waits_for = None
            self._end_wait(stage, transfer, since)
        self._start_next(lane, time)

    def _check_all_ended(self) -> None:
        for stage in self._stages:
            transfer = stage.waits_for
            if transfer is not None:
                raise RuntimeError(
                    f"stage {stage.index} waits for ever for {transfer.message}, "
                    f"{transfer.kind} lane"
                )
