"""From configurations to a model on this rank and the step that runs it."""

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from torch import distributed

from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.model.configuration import ModelConfig
from megatron_attnres.model.gpt import GPTChunk
from megatron_attnres.model.megatron_config import megatron_config
from megatron_attnres.parallel.cpu import device
from megatron_attnres.parallel.groups import ParallelGroups
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.pipeline.boundary import ChunkBoundary
from megatron_attnres.pipeline.cache import BlockCache
from megatron_attnres.pipeline.chunk import PipelineChunk
from megatron_attnres.pipeline.communicator import AttnResP2PCommunicator
from megatron_attnres.pipeline.lanes import create_lanes
from megatron_attnres.pipeline.plan import PipelinePlan, Policy, even_layers
from megatron_attnres.pipeline.relay import RelayExchange
from megatron_attnres.pipeline.schedule import ScheduleConfig
from megatron_attnres.pipeline.step import PipelineStep
from megatron_attnres.pipeline.wire import Wire


def make_plan(model: ModelConfig, layout: ParallelLayout, policy: Policy) -> PipelinePlan:
    """The pipeline plan of a model on a layout."""
    block_size = None if model.attn_res.mode == "baseline" else model.attn_res.block_size
    layers = layout.layers_per_chunk or even_layers(model.num_layers, layout.num_chunks)
    return PipelinePlan(layers, layout.pipeline, block_size, policy)


def build_step(
    model: ModelConfig,
    groups: ParallelGroups,
    micro_batch_size: int,
    dtype: torch.dtype,
    seed: int,
    schedule: ScheduleConfig,
    chunk_type: type[GPTChunk] = GPTChunk,
) -> PipelineStep:
    """Build this rank's chunks and the step over them. Collective over all ranks.

    Args:
        model: sizes and residual connections.
        groups: process groups of the layout.
        micro_batch_size: b.
        dtype: of parameters, activations and transfers.
        seed: of the initial weights and of dropout.
        schedule: how the pipeline schedule runs.
        chunk_type: of the model's chunks.
    """
    layout = groups.layout
    plan = make_plan(model, layout, schedule.policy)
    config = megatron_config(
        model, layout, dtype, schedule.microbatch_group_size, schedule.overlap_p2p
    )
    wire = _open_wire(model, groups, micro_batch_size, dtype)
    relay = RelayExchange(plan, wire) if wire is not None and schedule.early_relay else None
    cache = BlockCache()
    chunks = [
        PipelineChunk(
            chunk_type(
                model,
                config,
                groups.collection,
                plan,
                chunk.index,
                seed,
                schedule.recompute,
                device(),
            ),
            DepthState,
            config,
            ChunkBoundary(plan, chunk, cache, relay),
            chunk.virtual_stage if plan.virtual_size > 1 else None,
        )
        for chunk in plan.chunks_of_rank(groups.pipeline_rank)
    ]
    communicator = None
    if wire is not None:
        communicator = AttnResP2PCommunicator(groups.collection.pp, config, plan, wire, relay)
    return PipelineStep(
        chunks, communicator, cache, groups.collection, model.seq_length, micro_batch_size
    )


def _open_wire(
    model: ModelConfig, groups: ParallelGroups, micro_batch_size: int, dtype: torch.dtype
) -> Wire | None:
    """This rank's end of the pipeline's lanes; None with a single stage. Collective."""
    layout = groups.layout
    lanes = create_lanes(_pipeline_groups(layout), distributed.get_rank(), groups.timeout)
    if lanes is None:
        return None
    lanes.warm_up(groups.pipeline_rank, device())
    shards = layout.tensor if layout.sequence_parallel else 1
    entry_shape = (model.seq_length // shards, micro_batch_size, model.hidden_size)
    return Wire(lanes, groups.pipeline_rank, entry_shape, dtype, device())


def _pipeline_groups(layout: ParallelLayout) -> Sequence[Sequence[int]]:
    """Global ranks of every pipeline group, in Megatron-Core's rank order."""
    order = parallel_state.RankGenerator(
        tp=layout.tensor, ep=1, dp=layout.data, pp=layout.pipeline, cp=1, order="tp-cp-ep-dp-pp"
    )
    return order.get_ranks("pp")
