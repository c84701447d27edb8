"""The links between a pipeline's stages. Plain data, no torch."""

from dataclasses import dataclass
from typing import NamedTuple


class Link(NamedTuple):
    """What connects two ranks.

    Attributes:
        bytes_per_second: of one rank, each way.
        latency: seconds from the last byte's departure to its arrival.
    """

    bytes_per_second: float
    latency: float


@dataclass(frozen=True)
class Network:
    """The links of one pipeline.

    Attributes:
        inside: between ranks of one node.
        between: between ranks of different nodes.
        node_of_stage: by pipeline rank.
        shared: whether all that a rank sends (and all that it receives) at once shares its link
            evenly; else every lane has the link's whole rate.
    """

    inside: Link
    between: Link
    node_of_stage: tuple[int, ...]
    shared: bool = True

    def is_inside(self, sender: int, receiver: int) -> bool:
        """Whether two stages are on one node."""
        return self.node_of_stage[sender] == self.node_of_stage[receiver]

    def link(self, sender: int, receiver: int) -> Link:
        """What connects two stages."""
        return self.inside if self.is_inside(sender, receiver) else self.between


FREE = Link(float("inf"), 0.0)


def free_network(pipeline_size: int) -> Network:
    """Transfers take no time: what is left of a step is compute and the schedule's bubble."""
    return Network(FREE, FREE, (0,) * pipeline_size, shared=False)


def node_of_stages(
    pipeline_size: int, ranks_per_node: int, tensor: int = 1, data: int = 1
) -> tuple[int, ...]:
    """Nodes of the first pipeline's stages, in Megatron's rank order tp - dp - pp."""
    return tuple(stage * tensor * data // ranks_per_node for stage in range(pipeline_size))
