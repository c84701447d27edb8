"""One payload's predicted step as records, for pictures and traces."""

from megatron_attnres.analysis.predictions.outcomes import job_of
from megatron_attnres.analysis.predictions.scenario import Scenario
from megatron_attnres.pipeline.simulator.workload import Payload, predict
from megatron_attnres.pipeline.timeline.records import TimelineLayout, Timelines


def predicted_timelines(scenario: Scenario, payload: Payload) -> Timelines:
    """The step of one pipeline.

    Raises:
        InputError: Megatron-Core's schedule does not take the sizes.
    """
    layout = TimelineLayout(
        layers_per_chunk=scenario.layers_per_chunk,
        pipeline_size=scenario.layout.pipeline,
        block_size=payload.block_size,
        policy=payload.policy,
        early_relay=payload.early_relay,
        num_microbatches=scenario.num_microbatches,
        microbatch_group_size=scenario.microbatch_group_size,
        overlap_p2p=scenario.overlap_p2p,
        entry_bytes=scenario.entry_bytes,
    )
    return Timelines(layout, (predict(*job_of(scenario, payload)),))
