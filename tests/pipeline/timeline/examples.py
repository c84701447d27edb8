"""Example timelines: a schedule like Megatron-Core's, worked off on machines of given speeds.

Every rank warms up with forwards, then alternates, then ends with backwards. Sends never block;
each rank waits for its own at the end.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from random import Random

from hypothesis import strategies as st

from megatron_attnres.pipeline.messages import Message
from megatron_attnres.pipeline.timeline.records import (
    ComputeSpan,
    StageSpan,
    StepTimeline,
    TimelineLayout,
    Timelines,
    TransferSpan,
    WaitSpan,
    stage_of,
)
from tests.pipeline.orders import Layout

ENTRY_BYTES = 1000


@dataclass(frozen=True)
class Example:
    """Sizes, and seconds of a forward, a backward, an entry's transfer and the host's part.

    With ``jitter`` every duration is multiplied by up to 1 + jitter, and stages start apart.
    """

    pipeline: int = 2
    virtual: int = 2
    microbatches: int = 4
    forward: float = 0.01
    backward: float = 0.02
    transfer: float = 0.001
    host: float = 0.0
    overlap: bool = True
    early_relay: bool = True
    policy: str = "cached"
    block_size: int | None = 3
    jitter: float = 0.0
    begin: float = 0.0

    @property
    def sizes(self):
        group = self.microbatches if self.microbatches % self.pipeline else self.pipeline
        return Layout(
            self.pipeline,
            self.virtual,
            self.microbatches,
            group,
            block_size=self.block_size,
            policy=self.policy,
            early_relay=self.early_relay,
        )

    @property
    def layout(self):
        plan = self.sizes.plan()
        return TimelineLayout(
            layers_per_chunk=plan.layers_per_chunk,
            pipeline_size=self.pipeline,
            block_size=self.block_size,
            policy=self.policy,
            early_relay=self.early_relay,
            num_microbatches=self.microbatches,
            microbatch_group_size=self.sizes.group,
            overlap_p2p=self.overlap,
            entry_bytes=ENTRY_BYTES,
        )

    def step(self, seed=0, iteration=1, ranks=None):
        machine = _Machine(self, Random(seed))
        machine.run()
        return StepTimeline(
            iteration,
            tuple(ranks or range(self.pipeline)),
            tuple(machine.stages),
            tuple(machine.computes),
            tuple(machine.waits),
            tuple(machine.transfers),
        )

    def timelines(self, iterations=1, pipelines=1, clock_error=0.0):
        ranks = [range(first, self.pipeline * pipelines, pipelines) for first in range(pipelines)]
        steps = [
            self.step(10 * iteration + pipeline, iteration, ranks[pipeline])
            for iteration in range(1, iterations + 1)
            for pipeline in range(pipelines)
        ]
        return Timelines(self.layout, tuple(steps), clock_error)


@st.composite
def examples(draw):
    pipeline = draw(st.integers(1, 4))
    virtual = draw(st.integers(1, 3)) if pipeline > 1 else 1
    seconds = st.sampled_from([0.0, 0.001, 0.01, 0.0321])
    return Example(
        pipeline,
        virtual,
        draw(st.integers(pipeline if virtual > 1 else 1, 7)),
        forward=draw(seconds),
        backward=draw(seconds),
        transfer=draw(seconds),
        host=draw(seconds),
        overlap=draw(st.booleans()),
        early_relay=draw(st.booleans()),
        policy=draw(st.sampled_from(["cached", "naive"])),
        block_size=draw(st.none() | st.integers(1, 5)),
        jitter=draw(st.sampled_from([0.0, 0.7])),
        begin=draw(st.sampled_from([0.0, 1.2345678])),
    )


def all_timelines():
    """Of random examples: up to two iterations of two pipelines."""
    return st.builds(
        Example.timelines,
        examples(),
        st.integers(1, 2),
        st.integers(1, 2),
        st.sampled_from([0.0, 1e-5]),
    )


def changed(step, records, index, **fields):
    """The step with a record of one of its tuples replaced."""
    rows = list(getattr(step, records))
    rows[index] = rows[index]._replace(**fields)
    return replace(step, **{records: tuple(rows)})


class _Machine:
    """Works off every stage's schedule as soon as its inputs are on their way."""

    def __init__(self, example, dice):
        self.example, self.dice = example, dice
        self.plan, self.size = example.sizes.plan(), example.pipeline
        self.clock = [example.begin + self._jittered(0.0) for _ in range(self.size)]
        self.begun = list(self.clock)
        self.previous = list(self.clock)
        self.stages, self.computes, self.waits, self.transfers = [], [], [], []
        self.sent = {}
        self.completed = {}
        self.free = defaultdict(lambda: float("-inf"))

    def run(self):
        todo = [self._schedule(stage) for stage in range(self.size)]
        while any(todo):
            stage = next(s for s in range(self.size) if todo[s] and self._can_start(todo[s][0]))
            self._compute(stage, *todo[stage].pop(0))
        for stage in range(self.size):
            self._end(stage)

    def _schedule(self, stage):
        """(direction, chunk, micro-batch) in order."""
        sizes, last = self.example.sizes, self.example.virtual - 1
        table = sizes.table()
        forwards = [("forward", v * self.size + stage, m) for m, v in table]
        backwards = [("backward", (last - v) * self.size + stage, m) for m, v in table]
        warm_up = self.size - stage - 1
        if last > 0:
            warm_up = 2 * warm_up + last * sizes.group
        steady = zip(forwards[warm_up:], backwards, strict=False)
        rest = backwards[max(len(table) - warm_up, 0) :]
        return forwards[:warm_up] + [one for pair in steady for one in pair] + rest

    def _can_start(self, computed):
        message = self._incoming(*computed)
        return message is None or (message, "critical") in self.sent

    def _compute(self, stage, direction, chunk, microbatch):
        self.clock[stage] += self._jittered(self.example.host)
        self._receive(stage, self._incoming(direction, chunk, microbatch))
        start = self.clock[stage]
        incoming = self._incoming(direction, chunk, microbatch)
        outgoing = self._outgoing(direction, chunk, microbatch)
        if direction == "forward":
            self._wait(stage, "receive", incoming, "relay")
            self._send(stage, outgoing, "relay")
        self.clock[stage] += self._jittered(getattr(self.example, direction))
        if direction == "backward":
            self._wait(stage, "receive", incoming, "relay")
        span = ComputeSpan(stage, direction, chunk, microbatch, start, self.clock[stage])
        self.computes.append(span)
        self.previous[stage] = start
        self._send(stage, outgoing, "critical")
        if direction == "backward":
            self._send(stage, outgoing, "relay")

    def _incoming(self, direction, chunk, microbatch):
        return self._message(direction, chunk - (direction == "forward"), microbatch)

    def _outgoing(self, direction, chunk, microbatch):
        return self._message(direction, chunk - (direction == "backward"), microbatch)

    def _message(self, direction, hop, microbatch):
        return Message(direction, hop, microbatch) if 0 <= hop < len(self.plan.hops) else None

    def _entries(self, message, kind):
        hop = self.plan.hops[message.hop]
        if not self.example.early_relay:
            return hop.entries if kind == "critical" else 0
        return hop.critical_entries if kind == "critical" else len(hop.relayed)

    def _send(self, stage, message, kind):
        if message is not None and self._entries(message, kind):
            self.sent[message, kind] = self.clock[stage]

    def _receive(self, stage, message):
        """Post both kinds, and wait for the critical one."""
        if message is None:
            return
        posted = self.previous[stage] if self.example.overlap else self.clock[stage]
        for kind in ("critical", "relay"):
            if (message, kind) in self.sent:
                self._transfer(message, kind, posted)
        self._wait(stage, "receive", message, "critical")

    def _transfer(self, message, kind, receive_posted):
        lane = kind, message.direction, stage_of(message, "send", self.size)
        entries, sent = self._entries(message, kind), self.sent[message, kind]
        started = max(sent, receive_posted, self.free[lane])
        completed = started + self._jittered(entries * self.example.transfer)
        self.free[lane] = self.completed[message, kind] = completed
        num_bytes = entries * ENTRY_BYTES
        self.transfers.append(
            TransferSpan(message, kind, num_bytes, sent, receive_posted, started, completed)
        )

    def _wait(self, stage, side, message, kind):
        if (message, kind) not in self.completed:
            return
        start = self.clock[stage]
        self.clock[stage] = max(start, self.completed[message, kind])
        self.waits.append(WaitSpan(stage, side, message, kind, start, self.clock[stage]))

    def _end(self, stage):
        for message, kind in self.sent:
            if stage_of(message, "send", self.size) == stage:
                self._wait(stage, "send", message, kind)
        self.clock[stage] += self._jittered(self.example.host)
        self.stages.append(StageSpan(self.begun[stage], self.clock[stage]))

    def _jittered(self, seconds):
        apart = 1e-3 if seconds == 0.0 else seconds
        return seconds + self.dice.random() * self.example.jitter * apart
