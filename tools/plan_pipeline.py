"""What a layout sends: the pipeline plan per hop and in total. Pure arithmetic, instant.

python tools/plan_pipeline.py --num-layers 8 --attn-res-block-size 4 \\
    --pipeline-model-parallel-size 4 --virtual-pipeline-model-parallel-size 2

With --suggest: which virtual stages and blocks to take, by simulated steps (takes seconds).

python tools/plan_pipeline.py --suggest --memory-per-rank 8 --num-layers 128 --hidden-size 8192 \\
    --seq-length 8192 --micro-batch-size 1 --tensor-model-parallel-size 8 --sequence-parallel \\
    --pipeline-model-parallel-size 16 --num-microbatches 64 --layer-forward-ms 5 \\
    --bandwidth-between-nodes 50 --bandwidth-inside-node 400
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.analysis.predictions import flags
from megatron_attnres.analysis.predictions.description import (
    entry_size_of,
    layout_of,
    scenario_of,
)
from megatron_attnres.analysis.predictions.variants import candidates
from megatron_attnres.commands import CommandParser, run_command
from megatron_attnres.errors import InputError
from megatron_attnres.pipeline.plan import PipelinePlan, even_layers
from megatron_attnres.pipeline.plan_report import as_table, plan_report
from megatron_attnres.training.blocks import block_size_of
from megatron_attnres.training.checks import flag, required

GIBI = 2**30


def main(args: Sequence[str]) -> None:
    """Read the flags, plan or rank plans, print."""
    parser, of_suggestion = _parser()
    arguments = parser.parse_args(args)
    if arguments.suggest:
        _suggest(arguments)
        return
    for name in of_suggestion:
        if getattr(arguments, name) is not None:
            raise InputError(f"{flag(name)} {getattr(arguments, name)}: is for --suggest; add it")
    plan, entry = _plan(arguments), entry_size_of(arguments)
    report = plan_report(plan, entry)
    print(json.dumps(report) if arguments.json else as_table(report, plan))


def _parser() -> tuple[CommandParser, list[str]]:
    """The parser, and the keys of the flags that --suggest alone uses."""
    parser = CommandParser(
        "Print what every hop of a pipeline carries, by policy; or rank virtual stages and blocks "
        "for a cluster."
    )
    flags.add_block_flags(parser)
    parser.add_argument(
        "--attn-res-mode", choices=["baseline", "block", "full"], default="block", help="of a plan"
    )
    flags.add_layout_flags(parser)
    flags.add_size_flags(parser, ", for bytes (all three or none)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    group = parser.add_argument_group("suggestion")
    group.add_argument(
        "--suggest",
        action="store_true",
        help="rank V and the number of blocks by the simulated step of cached with early relay, "
        "from what the flags below say; those whose summaries do not fit come last",
    )
    memory = group.add_argument(
        "--memory-per-rank",
        type=flags.positive,
        metavar="GiB",
        help="memory of a rank that block summaries and partial sums may take",
    )
    return parser, [
        memory.dest,
        *flags.add_schedule_flags(parser),
        *flags.add_compute_flags(parser),
        *flags.add_cluster_flags(parser),
    ]


def _plan(arguments: argparse.Namespace) -> PipelinePlan:
    layout = layout_of(arguments)
    layers = layout.layers_per_chunk or even_layers(arguments.num_layers, layout.num_chunks)
    block_size = block_size_of(arguments, 2 * arguments.num_layers)
    baseline = arguments.attn_res_mode == "baseline"
    return PipelinePlan(layers, layout.pipeline, None if baseline else block_size)


def _suggest(arguments: argparse.Namespace) -> None:
    memory = required(arguments, "memory_per_rank", "in GiB") * GIBI
    scenario = scenario_of(arguments)
    scenarios = candidates(arguments, scenario)

    # Only now: torch takes seconds to load.
    from megatron_attnres.analysis.predictions.megatron_core import load_schedules

    load_schedules()
    from megatron_attnres.analysis.predictions import suggestion
    from megatron_attnres.analysis.predictions.sweep import sweep

    suggestions = suggestion.ranked(sweep(scenarios, naive=False), memory)
    if arguments.json:
        report = scenario.as_json() | {"suggestions": suggestion.as_json(suggestions)}
        print(json.dumps(report))
        return
    print("\n".join(scenario.assumptions.lines()), "", suggestion.as_table(suggestions), sep="\n")


if __name__ == "__main__":
    run_command(main)
