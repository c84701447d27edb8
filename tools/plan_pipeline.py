"""What a layout sends: the pipeline plan per hop and in total. Pure arithmetic, instant.

python tools/plan_pipeline.py --num-layers 8 --attn-res-block-size 4 \\
    --pipeline-model-parallel-size 4 --virtual-pipeline-model-parallel-size 2
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.commands import CommandParser, run_command, whole_number
from megatron_attnres.errors import InputError
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.pipeline.plan import PipelinePlan, even_layers
from megatron_attnres.pipeline.plan_report import EntrySize, as_table, plan_report
from megatron_attnres.training.blocks import block_size_of
from megatron_attnres.training.checks import check_chunks

BYTES = {"fp32": 4, "bf16": 2}
SIZES = ("seq_length", "micro_batch_size", "hidden_size")


def main(args: Sequence[str]) -> None:
    """Read the flags, plan, print."""
    arguments = _parser().parse_args(args)
    plan, entry = _plan(arguments), _entry(arguments)
    report = plan_report(plan, entry)
    print(json.dumps(report) if arguments.json else as_table(report, plan))


def _parser() -> CommandParser:
    parser = CommandParser("Print what every hop of a pipeline carries, by policy.")
    add = parser.add_argument_group("model").add_argument
    add("--num-layers", type=whole_number(1), required=True, help="Transformer layers")
    add("--attn-res-mode", choices=["baseline", "block", "full"], default="block")
    add("--attn-res-num-blocks", type=int, metavar="N", help="number of blocks")
    add("--attn-res-block-size", type=int, metavar="S", help="sublayers per block")
    add = parser.add_argument_group("layout").add_argument
    add("--pipeline-model-parallel-size", type=whole_number(1), default=1, help="stages P")
    add(
        "--virtual-pipeline-model-parallel-size",
        type=whole_number(1),
        default=1,
        help="chunks per stage V",
    )
    add(
        "--pipeline-layers-per-chunk",
        type=int,
        nargs="+",
        metavar="LAYERS",
        help="layers of each chunk where they are not equal",
    )
    add = parser.add_argument_group("sizes, for bytes (all three or none)").add_argument
    add("--seq-length", type=whole_number(1), help="tokens per sample")
    add("--micro-batch-size", type=whole_number(1), help="samples per micro-batch")
    add("--hidden-size", type=whole_number(1), help="width h")
    add("--precision", choices=sorted(BYTES), default="bf16", help="of activations")
    add(
        "--tensor-model-parallel-size",
        type=whole_number(1),
        default=1,
        help="with --sequence-parallel: shards of the sequence",
    )
    add("--sequence-parallel", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _plan(arguments: argparse.Namespace) -> PipelinePlan:
    given = arguments.pipeline_layers_per_chunk
    layout = ParallelLayout(
        pipeline=arguments.pipeline_model_parallel_size,
        virtual_pipeline=arguments.virtual_pipeline_model_parallel_size,
        layers_per_chunk=tuple(given) if given else None,
    )
    check_chunks(arguments.num_layers, layout)
    layers = layout.layers_per_chunk or even_layers(arguments.num_layers, layout.num_chunks)
    block_size = block_size_of(arguments, 2 * arguments.num_layers)
    baseline = arguments.attn_res_mode == "baseline"
    return PipelinePlan(layers, layout.pipeline, None if baseline else block_size)


def _entry(arguments: argparse.Namespace) -> EntrySize | None:
    sizes = {name: getattr(arguments, name) for name in SIZES}
    missing = [name for name, value in sizes.items() if value is None]
    if len(missing) == len(SIZES):
        return None
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise InputError(f"{flags} missing; bytes need all of them, entries none")
    shards = arguments.tensor_model_parallel_size if arguments.sequence_parallel else 1
    if arguments.seq_length % shards:
        raise InputError(
            f"--seq-length {arguments.seq_length}: must be divisible by "
            f"--tensor-model-parallel-size {shards} under --sequence-parallel"
        )
    return EntrySize(**sizes, bytes_per_element=BYTES[arguments.precision], sequence_shards=shards)


if __name__ == "__main__":
    run_command(main)
