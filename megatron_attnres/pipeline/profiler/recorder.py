"""Records one rank's step: hooks around its chunks, and the requests of its lanes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from megatron_attnres.pipeline.chunk import PipelineChunk
from megatron_attnres.pipeline.communicator import AttnResP2PCommunicator
from megatron_attnres.pipeline.messages import Direction, LaneKind, Message, Side
from megatron_attnres.pipeline.profiler.clocks import Clock, Completion
from megatron_attnres.pipeline.profiler.records import LaneMessage, RankStep, Received
from megatron_attnres.pipeline.timeline.records import ComputeSpan, StageSpan, WaitSpan
from megatron_attnres.pipeline.wire import Post


class _Marks(NamedTuple):
    """What is measured, before marks are seconds: rows of (what, first mark, second mark)."""

    computes: list[tuple[tuple[Direction, int, int], Any, Any]]
    waits: list[tuple[tuple[Side, Message, LaneKind], Any, Any]]
    sent: dict[LaneMessage, Any]
    received: dict[LaneMessage, tuple[Any, Completion, int]]


class StepRecorder:
    """Watches a step while it is attached to its chunks and communicator.

    A chunk's forward is the call of its module. Its backward begins when the gradient of its output
    is there and ends with autograd's pass. Both contain what the chunk's edges do: relayed entries
    are waited for, and sent on, inside.

    Args:
        clock: of the device.
        stage: pipeline rank.
    """

    def __init__(self, clock: Clock, stage: int) -> None:
        self._clock = clock
        self._stage = stage
        self._marks = _Marks([], [], {}, {})
        self._begin: Any = None
        self._detach: list[Callable[[], None]] = []

    def attach(self, chunks: Sequence[PipelineChunk], communicator: AttnResP2PCommunicator) -> None:
        """Watch from now on: the next micro-batch of every chunk is the step's first."""
        self._marks = _Marks([], [], {}, {})
        for chunk in chunks:
            self._watch_chunk(chunk)
        communicator.observe(self)
        self._detach.append(lambda: communicator.observe(None))
        self._clock.begin()
        self._begin = self._clock.mark()

    def detach(self, iteration: int, rank: int, pipeline: int) -> RankStep:
        """Stop watching and return what was measured, on this rank's clock."""
        end = self._clock.mark()
        while self._detach:
            self._detach.pop()()
        self._clock.end()
        seconds, marks, stage = self._clock.seconds, self._marks, self._stage
        return RankStep(
            iteration,
            rank,
            pipeline,
            stage,
            StageSpan(seconds(self._begin), seconds(end)),
            tuple(
                ComputeSpan(stage, *what, seconds(start), seconds(stop))
                for what, start, stop in marks.computes
            ),
            tuple(
                WaitSpan(stage, *what, seconds(start), seconds(stop))
                for what, start, stop in marks.waits
            ),
            {message: seconds(mark) for message, mark in marks.sent.items()},
            {
                message: Received(seconds(posted), seconds(completion.mark()), num_bytes)
                for message, (posted, completion, num_bytes) in marks.received.items()
            },
        )

    def posted(
        self,
        message: Message,
        kind: LaneKind,
        num_bytes: int,
        side: Side,
        post: Post,
    ) -> "_WatchedRequest":
        """Post a transfer and watch its request; called by the wire."""
        mark = self._clock.mark()
        request = post()
        if side == "send":
            self._marks.sent[message, kind] = mark
            return _WatchedRequest(request, (side, message, kind), self._clock, self._marks.waits)
        completion = self._clock.watch(request, (message.direction, kind))
        self._marks.received[message, kind] = mark, completion, num_bytes
        return _WatchedRequest(completion, (side, message, kind), self._clock, self._marks.waits)

    def _watch_chunk(self, chunk: PipelineChunk) -> None:
        started: list[Any] = []
        microbatches = iter(range(1 << 62))

        def before(module: nn.Module, inputs: Any) -> None:
            started.append(self._clock.mark())

        def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
            what = chunk.boundary.chunk.index, next(microbatches)
            self._marks.computes.append((("forward", *what), started.pop(), self._clock.mark()))
            if output.requires_grad:
                output.register_hook(lambda _: self._backward_begins(what))

        for handle in (
            chunk.register_forward_pre_hook(before),
            chunk.register_forward_hook(after),
        ):
            self._detach.append(handle.remove)

    def _backward_begins(self, what: tuple[int, int]) -> None:
        start = self._clock.mark()

        def ends() -> None:
            self._marks.computes.append((("backward", *what), start, self._clock.mark()))

        # Runs when autograd's pass is over, weight gradients included.
        torch.autograd.Variable._execution_engine.queue_callback(ends)


class _WatchedRequest:
    """A request whose waits are recorded."""

    def __init__(
        self,
        request: distributed.Work | Completion,
        what: tuple[Side, Message, LaneKind],
        clock: Clock,
        waits: list[Any],
    ) -> None:
        self._request = request
        self._what = what
        self._clock = clock
        self._waits = waits

    def wait(self) -> None:
        """Wait, and write down from when to when."""
        start = self._clock.mark()
        self._request.wait()
        self._waits.append((self._what, start, self._clock.mark()))

    def is_completed(self) -> bool:
        """Whether the transfer is over."""
        return self._request.is_completed()
