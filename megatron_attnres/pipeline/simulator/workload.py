"""What a step has to do, and its prediction for one way of carrying the payload."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_attnres.pipeline.messages import Direction, LaneKind, Message, lane_entries
from megatron_attnres.pipeline.plan import PipelinePlan, Policy
from megatron_attnres.pipeline.simulator.engine import Simulation
from megatron_attnres.pipeline.simulator.network import Network
from megatron_attnres.pipeline.simulator.operations import Operation, with_relay
from megatron_attnres.pipeline.simulator.schedule import ScheduleSizes, pipeline_operations
from megatron_attnres.pipeline.timeline.records import StepTimeline


class Payload(NamedTuple):
    """What hops carry.

    Attributes:
        block_size: S in sublayers; 1 is full mode, None standard residuals.
        policy: whether ranks keep sources between virtual stages.
        early_relay: whether received sources go on before the chunk computes.
    """

    block_size: int | None
    policy: Policy = "naive"
    early_relay: bool = False


@dataclass(frozen=True)
class Workload:
    """The computations of one pipeline's step.

    Attributes:
        schedule: sizes that decide on the order.
        layers_per_chunk: of every chunk, in model order.
        forward_seconds, backward_seconds: of every chunk for one micro-batch.
        entry_bytes: of one entry.
    """

    schedule: ScheduleSizes
    layers_per_chunk: tuple[int, ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    entry_bytes: int

    def seconds_of(self, direction: Direction, chunk: int) -> float:
        """Compute time of a chunk for one micro-batch."""
        return (self.forward_seconds if direction == "forward" else self.backward_seconds)[chunk]

    def plan(self, payload: Payload) -> PipelinePlan:
        """The pipeline plan under a payload."""
        return PipelinePlan(
            self.layers_per_chunk, self.schedule.pipeline_size, payload.block_size, payload.policy
        )

    @property
    def operations(self) -> tuple[Sequence[Operation], ...]:
        """Every stage's operations without relay lanes; the same for every payload."""
        return pipeline_operations(self.schedule)


def predict(workload: Workload, payload: Payload, network: Network) -> StepTimeline:
    """The step's timeline on a network."""
    return _simulation(workload, payload, network).run()


def predict_seconds(workload: Workload, payload: Payload, network: Network) -> float:
    """Step time alone, which takes less long."""
    return _simulation(workload, payload, network).run_to_end()


def peak_summary_entries(workload: Workload, payload: Payload) -> int:
    """Most entries that a rank holds at once, of all its micro-batches in flight.

    A chunk brings to its rank what its hop carries and what it completes itself; these live until
    its backward, which needs them. Cached reads share them.
    """
    plan = workload.plan(payload)
    brought = [
        len(chunk.produced) + (plan.hops[chunk.index - 1].entries if chunk.index else 0)
        for chunk in plan.chunks
    ]
    return max(_peak(program, brought) for program in workload.operations)


def _peak(program: Sequence[Operation], brought: Sequence[int]) -> int:
    held = peak = 0
    for what, message, _ in program:
        if what == "compute":
            held += brought[message.hop] * (1 if message.direction == "forward" else -1)
            peak = max(peak, held)
    return peak


def _simulation(workload: Workload, payload: Payload, network: Network) -> Simulation:
    plan = workload.plan(payload)
    programs = workload.operations
    if payload.early_relay:
        programs = tuple(with_relay(program, plan) for program in programs)

    def message_bytes(message: Message, kind: LaneKind) -> int:
        entries = lane_entries(plan.hops[message.hop], kind, payload.early_relay)
        return entries * workload.entry_bytes

    return Simulation(programs, network, workload.seconds_of, message_bytes)
