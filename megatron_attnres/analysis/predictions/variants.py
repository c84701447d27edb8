"""Other virtual stages and blocks of a scenario: those of a sweep, and those to rank. No torch."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from megatron_attnres.analysis.predictions.description import check_microbatches
from megatron_attnres.analysis.predictions.scenario import Scenario, blocks_of
from megatron_attnres.errors import InputError
from megatron_attnres.training.blocks import block_size_of
from megatron_attnres.training.checks import flag
from megatron_attnres.training.layout_checks import check_chunks

CHOSEN = (
    "virtual_pipeline_model_parallel_size",
    "pipeline_layers_per_chunk",
    "attn_res_num_blocks",
    "attn_res_block_size",
)


def variants(
    scenario: Scenario, virtual_sizes: Sequence[int], block_sizes: Sequence[int]
) -> list[Scenario]:
    """The scenario with every V and S, by V, then by S; it keeps its own chunks at its own V."""
    own = scenario.layout.virtual_pipeline
    return [
        replace(
            scenario if virtual == own else scenario.with_virtual_size(virtual), block_size=size
        )
        for virtual in dict.fromkeys(virtual_sizes)
        for size in dict.fromkeys(block_sizes)
    ]


def swept_scenarios(arguments: argparse.Namespace, scenario: Scenario) -> list[Scenario]:
    """What --sweep-virtual and --sweep-num-blocks ask for, by V, then by blocks; else nothing.

    Raises:
        InputError: a V or a number of blocks that the scenario cannot have.
    """
    virtual_sizes, blocks = arguments.sweep_virtual, arguments.sweep_num_blocks
    if virtual_sizes is None and blocks is None:
        return []
    for virtual in virtual_sizes or ():
        _check_virtual_size(scenario, virtual)
    block_sizes = [_swept_block_size(count, scenario.num_sublayers) for count in blocks or ()]
    return variants(
        scenario,
        virtual_sizes or [scenario.layout.virtual_pipeline],
        block_sizes or [scenario.block_size],
    )


def candidates(arguments: argparse.Namespace, scenario: Scenario) -> list[Scenario]:
    """The scenario with every candidate V and S.

    Raises:
        InputError: a flag that fixes what is to be chosen.
    """
    for name in CHOSEN:
        value = getattr(arguments, name)
        if value is not None:
            text = " ".join(map(str, value)) if isinstance(value, list) else value
            raise InputError(f"{flag(name)} {text}: --suggest chooses it; leave one of the two out")
    if arguments.attn_res_mode != "block":
        raise InputError(
            f"--attn-res-mode {arguments.attn_res_mode}: --suggest chooses blocks, of one sublayer "
            "in full mode; leave one of the two out"
        )
    virtual_sizes = virtual_candidates(
        scenario.num_layers,
        scenario.layout.pipeline,
        scenario.num_microbatches,
        scenario.microbatch_group_size,
    )
    return variants(scenario, virtual_sizes, block_candidates(scenario.num_sublayers))


def virtual_candidates(
    num_layers: int, pipeline_size: int, num_microbatches: int, group: int
) -> list[int]:
    """V whose P x V equal chunks the layers make, and whose schedule takes the micro-batches."""
    takes_micro_batches = (
        pipeline_size <= group <= num_microbatches
        and not 0 < num_microbatches % group < pipeline_size
    )
    return [
        virtual
        for virtual in range(1, num_layers // pipeline_size + 1)
        if num_layers % (pipeline_size * virtual) == 0 and (virtual == 1 or takes_micro_batches)
    ]


def block_candidates(num_sublayers: int) -> list[int]:
    """S, largest first, that makes 2, 4, 8, .. blocks, and 1 (every sublayer a block).

    Of several S that make the same number the smallest, whose blocks are the most equal.
    """
    counts = [2**exponent for exponent in range(1, num_sublayers.bit_length())]
    sizes = [-(-num_sublayers // count) for count in counts if count <= num_sublayers]
    made = [
        size
        for size, count in zip(sizes, counts, strict=False)
        if blocks_of(num_sublayers, size) == count
    ]
    return list(dict.fromkeys([*made, 1]))


def _swept_block_size(count: int, num_sublayers: int) -> int:
    arguments = argparse.Namespace(
        attn_res_mode="block", attn_res_num_blocks=count, attn_res_block_size=None
    )
    try:
        return block_size_of(arguments, num_sublayers)
    except InputError as error:
        reason = str(error).removeprefix(f"--attn-res-num-blocks {count}: ")
        raise InputError(f"--sweep-num-blocks {count}: {reason}") from None


def _check_virtual_size(scenario: Scenario, virtual: int) -> None:
    layout = scenario.layout
    if virtual == layout.virtual_pipeline:
        return
    if layout.layers_per_chunk is not None:
        raise InputError(
            f"--sweep-virtual {virtual}: the chunks are those of --pipeline-layers-per-chunk or "
            f"--compute-from, {layout.virtual_pipeline} per stage; leave one of the two out"
        )
    try:
        other = replace(layout, virtual_pipeline=virtual)
        check_chunks(scenario.num_layers, other)
        check_microbatches(other, scenario.num_microbatches, scenario.microbatch_group_size)
    except InputError as error:
        raise InputError(f"--sweep-virtual {virtual}: {error}") from None
