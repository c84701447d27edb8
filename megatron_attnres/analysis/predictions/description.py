"""From flags to a checked scenario. No torch, so that a bad flag is answered at once."""

import argparse

from megatron_attnres.analysis.predictions.assumptions import DEFAULTS, Assumptions
from megatron_attnres.analysis.predictions.compute_description import layer_times
from megatron_attnres.analysis.predictions.compute_times import MeasuredTimes
from megatron_attnres.analysis.predictions.scenario import Scenario
from megatron_attnres.errors import InputError
from megatron_attnres.optimizer.configuration import BYTES_PER_ELEMENT
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.pipeline.plan_report import EntrySize
from megatron_attnres.pipeline.simulator.network import Link, Network, node_of_stages
from megatron_attnres.pipeline.timeline.chunk_times import chunk_seconds
from megatron_attnres.pipeline.timeline.timeline_file import read_timelines
from megatron_attnres.training.blocks import block_size_of
from megatron_attnres.training.checks import flag, required
from megatron_attnres.training.layout_checks import check_chunks, check_interleaving

GIGA, MICRO = 1e9, 1e-6
ENTRY_SIZES = ("seq_length", "micro_batch_size", "hidden_size")
# What a profile says itself.
OF_PROFILE = (
    *("num_layers", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("pipeline_layers_per_chunk", "sequence_parallel", *ENTRY_SIZES, "precision"),
    *("num_microbatches", "microbatch_group_size_per_virtual_pipeline_stage"),
    *("overlap_p2p_communication", "layer_forward_ms", "layer_backward_ms", "tflops_per_rank"),
    *("ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("padded_vocab_size", "recompute_granularity"),
)
# Forwards and backwards of one step; more would be played for hours.
MOST_COMPUTATIONS = 20_000_000
NOT_SIMULATED = "communication of tensor and data parallelism, optimizer step, data loading"


def layout_of(arguments: argparse.Namespace) -> ParallelLayout:
    """Parallel sizes, checked against the number of layers.

    Raises:
        InputError: layers that do not make P x V chunks.
    """
    given = arguments.pipeline_layers_per_chunk
    layout = ParallelLayout(
        tensor=arguments.tensor_model_parallel_size or 1,
        pipeline=arguments.pipeline_model_parallel_size or 1,
        virtual_pipeline=arguments.virtual_pipeline_model_parallel_size or 1,
        data=getattr(arguments, "data_parallel_size", None) or 1,
        sequence_parallel=bool(arguments.sequence_parallel),
        layers_per_chunk=tuple(given) if given else None,
    )
    check_chunks(required(arguments, "num_layers"), layout)
    return layout


def entry_size_of(arguments: argparse.Namespace) -> EntrySize | None:
    """What an entry weighs; None if no size is given.

    Raises:
        InputError: some sizes but not all, or a sequence that TP does not divide.
    """
    sizes = {name: getattr(arguments, name) for name in ENTRY_SIZES}
    missing = [name for name, value in sizes.items() if value is None]
    if len(missing) == len(ENTRY_SIZES):
        return None
    if missing:
        flags = ", ".join(map(flag, missing))
        raise InputError(f"{flags} missing; bytes need all of them, entries none")
    shards = (arguments.tensor_model_parallel_size or 1) if arguments.sequence_parallel else 1
    if arguments.seq_length % shards:
        raise InputError(
            f"--seq-length {arguments.seq_length}: must be divisible by "
            f"--tensor-model-parallel-size {shards} under --sequence-parallel"
        )
    precision = arguments.precision or DEFAULTS["precision"]
    return EntrySize(
        **sizes, bytes_per_element=BYTES_PER_ELEMENT[precision], sequence_shards=shards
    )


def scenario_of(arguments: argparse.Namespace) -> Scenario:
    """The scenario that flags describe.

    Raises:
        InputError: a flag that is missing, or that does not fit the others.
    """
    if getattr(arguments, "compute_from", None) is not None:
        return _measured_scenario(arguments)
    layout = layout_of(arguments)
    _check_stages(layout)
    for name in ENTRY_SIZES:
        required(arguments, name)
    entry = entry_size_of(arguments)
    microbatches = required(arguments, "num_microbatches")
    given_group = arguments.microbatch_group_size_per_virtual_pipeline_stage
    group = given_group or layout.pipeline
    check_microbatches(layout, microbatches, group)

    assumptions = Assumptions()
    assumptions.take(arguments, "precision")
    assumptions.take(arguments, "sequence_parallel")
    assumptions.note("entry_bytes", entry.bytes, "bytes")
    origin = "given" if given_group else "default"
    assumptions.note("microbatch_group_size", group, "micro-batches", origin)
    overlap = assumptions.take(arguments, "overlap_p2p_communication")
    times = layer_times(arguments, layout, assumptions)
    return Scenario(
        layout=layout,
        num_layers=arguments.num_layers,
        block_size=_block_size(arguments, arguments.num_layers),
        num_microbatches=microbatches,
        microbatch_group_size=group,
        overlap_p2p=overlap,
        times=times,
        entry_bytes=entry.bytes,
        network=_network(arguments, layout, assumptions),
        tokens_per_microbatch=entry.seq_length * entry.micro_batch_size,
        assumptions=assumptions,
    )


def check_microbatches(layout: ParallelLayout, microbatches: int, group: int) -> None:
    """Refuse micro-batches that Megatron-Core's schedule does not take, or far too many.

    Raises:
        InputError: see above.
    """
    computations = 2 * layout.num_chunks * microbatches
    if computations > MOST_COMPUTATIONS:
        raise InputError(
            f"--num-microbatches {microbatches}: with {layout.num_chunks} chunks a step has "
            f"{computations:,} forwards and backwards; at most {MOST_COMPUTATIONS:,} are simulated"
        )
    if layout.virtual_pipeline > 1:
        batch = f"--num-microbatches {microbatches}"
        check_interleaving(layout.pipeline, microbatches, group, batch)


def _measured_scenario(arguments: argparse.Namespace) -> Scenario:
    """Layout and compute times from a profile, the cluster from flags."""
    path = arguments.compute_from
    for name in OF_PROFILE:
        if getattr(arguments, name) is not None:
            raise InputError(f"{flag(name)}: --compute-from {path} says it; leave it out")
    timelines = read_timelines(path)
    try:
        seconds = chunk_seconds(timelines)
    except ValueError as error:
        raise InputError(f"--compute-from {path}: {error}") from None
    if not any((*seconds.forward, *seconds.backward)):
        raise InputError(f"--compute-from {path}: no computation took any time; give another one")
    profiled = timelines.layout
    layout = ParallelLayout(
        tensor=arguments.tensor_model_parallel_size or 1,
        pipeline=profiled.pipeline_size,
        virtual_pipeline=profiled.plan.virtual_size,
        data=arguments.data_parallel_size or 1,
        layers_per_chunk=profiled.layers_per_chunk,
    )
    _check_stages(layout)
    try:
        check_microbatches(layout, profiled.num_microbatches, profiled.microbatch_group_size)
    except InputError as error:
        raise InputError(f"--compute-from {path}: its layout cannot be: {error}") from None
    assumptions = Assumptions()
    assumptions.note("compute_times", f"medians of {path}", origin="profile")
    assumptions.note(
        "measured_block_size", profiled.block_size or "standard residuals", origin="profile"
    )
    assumptions.note("entry_bytes", profiled.entry_bytes, "bytes", "profile")
    share = assumptions.take(arguments, "depth_attention_share", "of a layer's time")
    num_layers = sum(profiled.layers_per_chunk)
    return Scenario(
        layout=layout,
        num_layers=num_layers,
        block_size=_block_size(arguments, num_layers, profiled.block_size),
        num_microbatches=profiled.num_microbatches,
        microbatch_group_size=profiled.microbatch_group_size,
        overlap_p2p=profiled.overlap_p2p,
        times=MeasuredTimes(seconds, profiled.block_size is not None, share),
        entry_bytes=profiled.entry_bytes,
        network=_network(arguments, layout, assumptions),
        tokens_per_microbatch=None,
        assumptions=assumptions,
    )


def _block_size(arguments: argparse.Namespace, num_layers: int, measured: int | None = None) -> int:
    """S of block mode, whichever modes are asked for."""
    blocks, size = arguments.attn_res_num_blocks, arguments.attn_res_block_size
    if measured is not None and blocks is None and size is None:
        return measured
    block_mode = argparse.Namespace(
        attn_res_mode="block", attn_res_num_blocks=blocks, attn_res_block_size=size
    )
    return block_size_of(block_mode, 2 * num_layers)


def _check_stages(layout: ParallelLayout) -> None:
    if layout.pipeline == 1:
        raise InputError(
            "--pipeline-model-parallel-size 1: a single stage sends nothing; give 2 or more"
        )
    if layout.sequence_parallel and layout.tensor == 1:
        raise InputError(
            "--sequence-parallel: needs --tensor-model-parallel-size of 2 or more, which is 1"
        )


def _network(
    arguments: argparse.Namespace, layout: ParallelLayout, assumptions: Assumptions
) -> Network:
    for name in ("bandwidth_between_nodes", "bandwidth_inside_node"):
        required(arguments, name, "in GB/s")
    per_node = assumptions.take(arguments, "ranks_per_node", "ranks")
    assumptions.take(arguments, "data_parallel_size", "pipelines")
    nodes = node_of_stages(layout.pipeline, per_node, layout.tensor, layout.data)
    # The ring closes only where there are virtual stages.
    following = nodes[1:] + (nodes[:1] if layout.virtual_pipeline > 1 else ())
    neighbours = list(zip(nodes, following, strict=False))
    hops_inside = sum(one == other for one, other in neighbours)
    assumptions.note("neighbouring_stages_on_one_node", hops_inside, f"of {len(neighbours)}")

    def link(place: str) -> Link:
        bandwidth = assumptions.take(arguments, f"bandwidth_{place}", "GB/s per rank, each way")
        return Link(bandwidth * GIGA, assumptions.take(arguments, f"latency_{place}", "us") * MICRO)

    between, inside = link("between_nodes"), link("inside_node")
    shared = assumptions.take(arguments, "share_link")
    assumptions.note("not_simulated", NOT_SIMULATED, origin="fixed")
    return Network(inside, between, nodes, shared)
