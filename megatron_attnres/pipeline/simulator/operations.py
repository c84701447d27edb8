"""What one stage does in a step, in order. Plain data, no torch.

A schedule (Megatron-Core's) gives the operations on critical lanes; the plan adds those on relay
lanes, by the rules of ``pipeline/relay.py`` and ``pipeline/boundary.py``.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from megatron_attnres.pipeline.messages import LaneKind, Message
from megatron_attnres.pipeline.plan import PipelinePlan


class Operation(NamedTuple):
    """One step of a stage's program.

    Attributes:
        what: ``compute`` a chunk; ``post`` a receive; ``send`` without waiting; ``wait`` for a
            receive.
        message: what is transferred; of a computation its direction, chunk (as ``hop``) and
            micro-batch.
        kind: of the lane; None for a computation.
    """

    what: Literal["compute", "post", "send", "wait"]
    message: Message
    kind: LaneKind | None = None


def with_relay(operations: Sequence[Operation], plan: PipelinePlan) -> list[Operation]:
    """A schedule's operations and those of the relay lanes between them.

    Relayed entries are received beside the critical ones of their hop and waited for, and sent on,
    when the chunk starts. Backward they leave after the critical gradient and are waited for when
    the chunk's own backward has come to its inputs.
    """
    relaying = frozenset(hop.index for hop in plan.hops if hop.relayed)
    return [step for operation in operations for step in _around(operation, relaying)]


def _around(operation: Operation, relaying: frozenset[int]) -> Sequence[Operation]:
    """The operation amid those of the relay lanes of its hop, or of its chunk's two hops."""
    what, message, _ = operation
    direction, hop, microbatch = message
    if what == "compute" and direction == "forward":
        steps = []
        if hop - 1 in relaying:
            steps.append(Operation("wait", Message(direction, hop - 1, microbatch), "relay"))
        if hop in relaying:
            steps.append(Operation("send", message, "relay"))
        return [*steps, operation]
    if hop not in relaying:
        return (operation,)
    if what == "compute":
        return operation, Operation("wait", message, "relay")
    if what == "post" or (what == "send" and direction == "backward"):
        return operation, Operation(what, message, "relay")
    return (operation,)
