"""The simulator's word on a step that was measured over a slow network."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from megatron_attnres.parallel.cpu import redirect_cuda_calls
from megatron_attnres.pipeline.simulator.network import Link, Network
from megatron_attnres.pipeline.simulator.schedule import ScheduleSizes
from megatron_attnres.pipeline.simulator.workload import Payload, Workload, predict
from megatron_attnres.pipeline.timeline.chunk_times import chunk_seconds
from megatron_attnres.pipeline.timeline.parts import stage_parts
from megatron_attnres.pipeline.timeline.records import StepTimeline, Timelines

# Of a tiny message from rank to rank in these namespaces, seconds.
LATENCY = 1.5e-4


@dataclass(frozen=True)
class Prediction:
    """A step time and what of it, on the average stage, is exposed communication; seconds."""

    seconds: float
    exposed: float


def predicted(timelines: Timelines, bytes_per_second: float) -> Prediction:
    """A policy's step on links of a rate, from its own measured compute times."""
    redirect_cuda_calls()
    layout = timelines.layout
    stages = range(layout.pipeline_size)
    workload = Workload(
        ScheduleSizes(
            layout.pipeline_size,
            layout.plan.virtual_size,
            layout.num_microbatches,
            layout.microbatch_group_size,
            layout.overlap_p2p,
        ),
        layout.layers_per_chunk,
        *chunk_seconds(timelines),
        layout.entry_bytes,
    )
    link = Link(bytes_per_second, LATENCY)
    # Every rank is a node of its own, behind one link for all that it sends.
    network = Network(link, link, tuple(stages), shared=True)
    payload = Payload(layout.block_size, layout.policy, layout.early_relay)
    timeline = predict(workload, payload, network)
    return Prediction(timeline.seconds, exposed_seconds([timeline]))


def exposed_seconds(steps: Sequence[StepTimeline]) -> float:
    """Exposed communication of the average stage; median over the steps."""
    return median(
        fmean(parts.exposed for parts in stage_parts(step, len(step.ranks))) for step in steps
    )
