"""Early relay: entries that a chunk received go on before it computes, on lanes of their own.

Forward, a relay receive is posted with the critical receive of the same hop and waited for when the
chunk starts, which sends the entries on at once. Backward, gradients of relayed entries leave right
after the critical gradient of the hop that brought them, and the chunk upstream waits for them when
its own backward has come to its inputs.
"""

import torch
from torch import Tensor

from megatron_attnres.pipeline.messages import Direction, Message
from megatron_attnres.pipeline.plan import PipelinePlan
from megatron_attnres.pipeline.transfer import Transfer
from megatron_attnres.pipeline.wire import Wire


class RelayExchange:
    """The relay lanes of one rank during a step.

    Args:
        plan: the pipeline plan.
        wire: this rank's end of the lanes.
    """

    def __init__(self, plan: PipelinePlan, wire: Wire) -> None:
        self._plan = plan
        self._wire = wire
        self._inbox: dict[Message, Transfer] = {}
        self._gradients: dict[Message, dict[int, Tensor]] = {}

    def post_receive(self, message: Message) -> None:
        """Post the receive of what travels beside a critical message."""
        relayed = self._plan.hops[message.hop].relayed
        if relayed:
            self._inbox[message] = self._wire.receive(message, "relay", len(relayed))

    def entries(self, direction: Direction, hop: int, microbatch: int) -> dict[int, Tensor]:
        """What was received beside a critical message, by source; waits for it.

        Each source is handed out until ``forget`` is called.
        """
        message = Message(direction, hop, microbatch)
        if message not in self._inbox:
            return {}
        stacked = self._inbox[message].wait()
        return dict(zip(self._plan.hops[hop].relayed, stacked.unbind(), strict=True))

    def gradient(self, hop: int, microbatch: int, source: int) -> Tensor | None:
        """Take the gradient that came from downstream for an entry relayed over a hop."""
        if source not in self._plan.hops[hop].relayed:
            return None
        return self.entries("backward", hop, microbatch)[source]

    def forget(self, direction: Direction, hop: int, microbatch: int) -> None:
        """Drop what was received beside a critical message; its chunk has used it."""
        self._inbox.pop(Message(direction, hop, microbatch), None)

    def send_forward(self, hop: int, microbatch: int, sources: dict[int, Tensor]) -> None:
        """Send the relayed entries of a hop on."""
        relayed = self._plan.hops[hop].relayed
        if relayed:
            stacked = torch.stack([sources[source].detach() for source in relayed])
            message = Message("forward", hop, microbatch)
            self._wire.send(message, "relay", stacked, len(relayed))

    def keep_gradient(self, hop: int, microbatch: int, source: int, gradient: Tensor) -> None:
        """Keep the gradient of an entry that was received over a hop's relay lane."""
        self._gradients.setdefault(Message("backward", hop, microbatch), {})[source] = gradient

    def send_gradients(self, message: Message) -> None:
        """Send the gradients of a hop's relayed entries upstream.

        The backward of the chunk that the hop leads to has ended: what came to it from further
        downstream is in these gradients.
        """
        self.forget("backward", message.hop + 1, message.microbatch)
        relayed = self._plan.hops[message.hop].relayed
        if relayed:
            kept = self._gradients.pop(message)
            stacked = torch.stack([kept[source] for source in relayed])
            self._wire.send(message, "relay", stacked, len(relayed))

    def check_empty(self) -> None:
        """Raise if anything is left at the end of a step.

        Raises:
            RuntimeError: names the message.
        """
        for message in (*self._inbox, *self._gradients):
            raise RuntimeError(f"the step ended before {message}, relay lane, was used")
