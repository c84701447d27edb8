"""What every rank posts, sends and waits for in a step, restated from Megatron-Core's schedules.

No torch: an oracle for the posting order of random layouts, and the machine that runs the ranks
against each other. test_messages.py holds it against the schedules themselves.
"""

from collections import defaultdict
from typing import Literal, NamedTuple

from hypothesis import assume
from hypothesis import strategies as st

from megatron_attnres.pipeline.messages import Direction, LaneKind, Message
from megatron_attnres.pipeline.plan import PipelinePlan


class Layout(NamedTuple):
    """Sizes that decide on the messages and their order."""

    pipeline: int
    virtual: int
    microbatches: int
    group: int
    layers: tuple[int, ...] | None = None
    block_size: int | None = 3
    policy: str = "cached"
    early_relay: bool = True

    @property
    def chunks(self):
        return self.pipeline * self.virtual

    def plan(self):
        return PipelinePlan(
            self.layers or (1,) * self.chunks, self.pipeline, self.block_size, self.policy
        )

    def table(self):
        """(micro-batch, virtual stage) of a rank's forwards: group by group, stage by stage."""
        first_of_groups = range(0, self.microbatches, self.group)
        return [
            (microbatch, stage)
            for first in first_of_groups
            for stage in range(self.virtual)
            for microbatch in range(first, min(first + self.group, self.microbatches))
        ]


@st.composite
def layouts(draw, largest_pipeline=6, largest_virtual=4, most_microbatches=20):
    """All that the schedules take."""
    pipeline = draw(st.integers(2, largest_pipeline))
    virtual = draw(st.integers(1, largest_virtual))
    microbatches = draw(st.integers(pipeline if virtual > 1 else 1, most_microbatches))
    group = draw(st.integers(min(pipeline, microbatches), microbatches))
    rest = microbatches % group
    assume(virtual == 1 or rest == 0 or rest >= pipeline)
    chunks = pipeline * virtual
    layers = draw(st.lists(st.integers(1, 3), min_size=chunks, max_size=chunks))
    if draw(st.booleans()):
        layers[0] = 0
    if chunks > 2 and draw(st.booleans()):
        layers[-1] = 0
    return Layout(
        pipeline,
        virtual,
        microbatches,
        group,
        tuple(layers),
        draw(st.none() | st.integers(1, 2 * sum(layers) + 1)),
        draw(st.sampled_from(["cached", "naive"])),
        draw(st.booleans()),
    )


class Event(NamedTuple):
    """What a rank did on a lane; ``compute`` is a chunk's forward or backward."""

    what: Literal["post", "wait", "send", "compute"]
    kind: LaneKind | None
    message: Message


class Rank:
    """Writes down what one rank does."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.size, self.plan, self.table = layout.pipeline, layout.plan(), layout.table()
        self.total = len(self.table)
        self.events: list[Event] = []
        self.posted: dict[Direction, list[Message]] = {"forward": [], "backward": []}

    def computed(self, direction: Direction, k: int, rank: int | None = None) -> tuple[int, int]:
        """Chunk and micro-batch of a rank's k-th forward or backward."""
        microbatch, stage = self.table[k]
        if direction == "backward":
            stage = self.layout.virtual - 1 - stage
        return stage * self.size + (self.rank if rank is None else rank), microbatch

    def compute(self, direction: Direction, k: int) -> None:
        chunk, microbatch = self.computed(direction, k)
        if direction == "forward":
            self._relayed("wait", Message("forward", chunk - 1, microbatch))
            self._relayed("send", Message("forward", chunk, microbatch))
        self.events.append(Event("compute", None, Message(direction, chunk, microbatch)))
        if direction == "backward":
            self._relayed("wait", Message("backward", chunk, microbatch))

    def sends(self, direction: Direction, k: int) -> list[Message]:
        """What goes out after the k-th forward or backward."""
        chunk, microbatch = self.computed(direction, k)
        hop = chunk if direction == "forward" else chunk - 1
        return [Message(direction, hop, microbatch)] * (0 <= hop < len(self.plan.hops))

    def next_input(self, direction: Direction, k: int) -> list[Message]:
        """What the k-th computation reads from the wire."""
        if k >= self.total:
            return []
        chunk, microbatch = self.computed(direction, k)
        hop = chunk - 1 if direction == "forward" else chunk
        return [Message(direction, hop, microbatch)] * (0 <= hop < len(self.plan.hops))

    def arrives(self, direction: Direction, k: int) -> list[Message]:
        """What is posted after the k-th computation: the next one's input, or, on the rank where
        the ring closes, what the rank before it sends in that slot."""
        first, before = (0, self.size - 1) if direction == "forward" else (self.size - 1, 0)
        if self.rank != first:
            return self.next_input(direction, k + 1)
        k -= self.size - 1
        if k < 0:
            return []
        chunk, microbatch = self.computed(direction, k, before)
        hop = chunk if direction == "forward" else chunk - 1
        return [Message(direction, hop, microbatch)] * (0 <= hop < len(self.plan.hops))

    def communicate(self, receive: list[Message], send: list[Message], wait: bool = True) -> None:
        """One call of the communicator: receives are posted first."""
        for message in receive:
            self.events.append(Event("post", "critical", message))
            self._relayed("post", message)
        for message in send:
            self.events.append(Event("send", "critical", message))
            if message.direction == "backward":
                self._relayed("send", message)
        for message in receive:
            if wait:
                self.events.append(Event("wait", "critical", message))
            else:
                self.posted[message.direction].append(message)

    def wait_for_posted(self, direction: Direction, k: int) -> None:
        """Before the k-th computation with overlap: the oldest receive not waited for."""
        if self.posted[direction] and self.next_input(direction, k):
            self.events.append(Event("wait", "critical", self.posted[direction].pop(0)))

    def _relayed(self, what: str, message: Message) -> None:
        hops = self.plan.hops
        exists = self.layout.early_relay and 0 <= message.hop < len(hops)
        if exists and hops[message.hop].relayed:
            self.events.append(Event(what, "relay", message))


def without_interleaving(layout: Layout, rank: int, forward_only: bool) -> list[Event]:
    """Megatron-Core's ``forward_backward_pipelining_without_interleaving`` on one rank."""
    r = Rank(layout, rank)
    total = r.total
    warm_up = min(layout.pipeline - rank - 1, total)
    for k in range(warm_up):
        r.communicate(r.next_input("forward", k), [])
        r.compute("forward", k)
        r.communicate([], r.sends("forward", k))
    r.communicate(r.next_input("forward", warm_up), [])
    for k in range(total - warm_up):
        r.compute("forward", warm_up + k)
        following = r.next_input("forward", warm_up + k + 1)
        if forward_only:
            r.communicate([], r.sends("forward", warm_up + k))
            r.communicate(following, [])
            continue
        r.communicate(r.next_input("backward", k), r.sends("forward", warm_up + k))
        r.compute("backward", k)
        r.communicate(following, r.sends("backward", k))
    for k in () if forward_only else range(total - warm_up, total):
        r.communicate(r.next_input("backward", k), [])
        r.compute("backward", k)
        r.communicate([], r.sends("backward", k))
    return r.events


def with_interleaving(layout: Layout, rank: int, overlap: bool, forward_only: bool) -> list[Event]:
    """Megatron-Core's ``forward_backward_pipelining_with_interleaving`` on one rank."""
    r = Rank(layout, rank)
    total = r.total
    warm_up = 2 * (layout.pipeline - rank - 1) + (layout.virtual - 1) * layout.group
    warm_up = total if forward_only else min(warm_up, total)
    steady = total - warm_up
    r.communicate(r.next_input("forward", 0), [])
    for k in range(warm_up):
        r.compute("forward", k)
        receive = r.arrives("forward", k) if k < total - 1 else []
        begins_steady = k == warm_up - 1 and steady > 0
        gradient = r.next_input("backward", 0) if begins_steady else []
        if overlap:
            r.communicate(receive, r.sends("forward", k))
            r.communicate(gradient, [], wait=False)
        else:
            r.communicate(receive + gradient, r.sends("forward", k))
    for k in range(steady):
        forward = warm_up + k
        receive = r.arrives("forward", forward) if k < steady - 1 else []
        gradient = r.arrives("backward", k)
        if overlap:
            r.wait_for_posted("forward", forward)
            r.compute("forward", forward)
            r.communicate(receive, r.sends("forward", forward), wait=False)
            r.wait_for_posted("backward", k)
            r.compute("backward", k)
            r.communicate(gradient, r.sends("backward", k), wait=False)
        else:
            r.compute("forward", forward)
            r.compute("backward", k)
            r.communicate(receive + gradient, r.sends("forward", forward) + r.sends("backward", k))
    if forward_only:
        return r.events
    if steady == 0:
        r.communicate(r.next_input("backward", 0), [])
    for k in range(steady, total):
        r.wait_for_posted("backward", k)
        r.compute("backward", k)
        r.communicate(r.arrives("backward", k) if k < total - 1 else [], r.sends("backward", k))
    return r.events


def posting_order(layout: Layout, rank: int, *, overlap: bool, forward_only: bool) -> list[Event]:
    """All that a rank does in one step."""
    if layout.virtual == 1:
        return without_interleaving(layout, rank, forward_only)
    return with_interleaving(layout, rank, overlap, forward_only)


class Lane:
    """Receives and sends of one edge, in the order in which they were posted."""

    def __init__(self) -> None:
        self.posted: list[Message] = []
        self.sent: list[Message] = []


def run_to_the_end(
    diaries: list[list[Event]], blocking: tuple[LaneKind, ...] = ("critical",)
) -> None:
    """Let all ranks work off their diaries.

    A wait stops a rank until the message was sent. On the lanes of the ``blocking`` kinds a send
    stops it too, until the receiver has posted the receive (rendezvous). On every lane sends and
    receives pair up first-in first-out, and each pair must be one message.
    """
    size = len(diaries)
    lanes: dict[tuple[LaneKind, Direction, int], Lane] = defaultdict(Lane)
    positions = [0] * size

    def step(event: Event) -> bool:
        what, kind, message = event
        if what == "compute":
            return True
        sender = (message.hop + (message.direction == "backward")) % size
        lane = lanes[kind, message.direction, sender]
        if what == "post":
            lane.posted.append(message)
        elif what == "wait":
            return message in lane.sent
        elif kind in blocking and len(lane.posted) == len(lane.sent):
            return False
        else:
            lane.sent.append(message)
        paired = min(len(lane.posted), len(lane.sent))
        if paired:
            received, sent = lane.posted[paired - 1], lane.sent[paired - 1]
            assert received == sent, f"{received} is posted for {sent} on the {kind} lane"
        return True

    moved = True
    while moved:
        moved = False
        for rank, diary in enumerate(diaries):
            while positions[rank] < len(diary) and step(diary[positions[rank]]):
                positions[rank] += 1
                moved = True
    stuck = [d[p] for d, p in zip(diaries, positions, strict=True) if p < len(d)]
    assert not stuck, f"ranks wait for ever: {stuck}"
    for lane in lanes.values():
        assert lane.posted == lane.sent
