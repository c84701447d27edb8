"""Flags of the commands that plan and predict. No torch.

Defaults are None wherever a command has to tell a given value from an assumed one; the help names
what is assumed.
"""

import argparse
import math

from megatron_attnres.commands import CommandParser, whole_number

MOST_LAYERS = 100_000
# Beyond these no quantity here is one, and times would leave the range of floats.
_LEAST, _MOST = 1e-12, 1e15


def positive(text: str) -> float:
    """An argparse type: numbers above 0."""
    return _number(text, _LEAST, f"a finite number above 0 (from {_LEAST:g} to {_MOST:g})")


def not_negative(text: str) -> float:
    """An argparse type: 0 or more."""
    return _number(text, 0.0, f"a finite number of at least 0 (up to {_MOST:g})")


def _number(text: str, least: float, allowed: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed, {allowed} is")
    return number


def add_block_flags(parser: CommandParser, *, num_layers_required: bool = True) -> None:
    """Add layers and blocks."""
    add = parser.add_argument_group("model").add_argument
    add(
        "--num-layers",
        type=whole_number(1, MOST_LAYERS),
        required=num_layers_required,
        help="Transformer layers (two sublayers each)",
    )
    add("--attn-res-num-blocks", type=int, metavar="N", help="number of blocks")
    add(
        "--attn-res-block-size",
        type=int,
        metavar="S",
        help="sublayers per block (8 blocks if neither is given)",
    )


def add_layout_flags(parser: CommandParser) -> None:
    """Add how layers lie on ranks."""
    add = parser.add_argument_group("layout").add_argument
    add(
        "--pipeline-model-parallel-size",
        type=whole_number(1, MOST_LAYERS),
        metavar="P",
        help="stages; 1 if not given",
    )
    add(
        "--virtual-pipeline-model-parallel-size",
        type=whole_number(1, MOST_LAYERS),
        metavar="V",
        help="chunks per stage; 1 if not given",
    )
    add(
        "--pipeline-layers-per-chunk",
        type=int,
        nargs="+",
        metavar="LAYERS",
        help="layers of each chunk where they are not equal",
    )
    add(
        "--tensor-model-parallel-size",
        type=whole_number(1),
        metavar="TP",
        help="ranks per layer; 1 if not given",
    )
    add(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        help="an entry is one of TP shards of the sequence; off if not given",
    )


def add_size_flags(parser: CommandParser, note: str = "") -> None:
    """Add what an entry's bytes follow from."""
    add = parser.add_argument_group(f"size of an entry{note}").add_argument
    add("--seq-length", type=whole_number(1), help="tokens per sample")
    add("--micro-batch-size", type=whole_number(1), help="samples per micro-batch")
    add("--hidden-size", type=whole_number(1), help="width h")
    add("--precision", choices=("bf16", "fp32"), help="of activations; bf16 if not given")


def add_schedule_flags(parser: CommandParser) -> list[str]:
    """Add what Megatron-Core's schedules ask for; return the keys."""
    group = parser.add_argument_group("schedule")
    add = group.add_argument
    add(
        "--num-microbatches",
        type=whole_number(1),
        metavar="M",
        help="micro-batches of one pipeline in a step: global batch / (micro-batch size x DP)",
    )
    add(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        type=whole_number(1),
        metavar="N",
        help="contiguous micro-batches of one virtual stage; P if not given",
    )
    add(
        "--overlap-p2p-communication",
        action=argparse.BooleanOptionalAction,
        help="interleaved schedule: post receives ahead of compute; on if not given",
    )
    return _keys(group)


def add_compute_flags(parser: CommandParser) -> list[str]:
    """Add compute times: given, or FLOPs over a rate; return the keys."""
    group = parser.add_argument_group(
        "compute times", "of one micro-batch: --layer-forward-ms or --tflops-per-rank"
    )
    add = group.add_argument
    add(
        "--layer-forward-ms",
        type=positive,
        metavar="MS",
        help="one layer's forward on its TP ranks, with standard residuals",
    )
    add(
        "--layer-backward-ms",
        type=positive,
        metavar="MS",
        help="one layer's backward, recomputation included; 2 x forward if not given, 3 x with "
        "--recompute-granularity full",
    )
    add(
        "--tflops-per-rank",
        type=positive,
        metavar="TFLOP/s",
        help="rate of one rank in 10^12 operations a second, 2 per multiply-add, core attention "
        "counted whole; backward takes 2 x forward",
    )
    add("--ffn-hidden-size", type=whole_number(1), help="width of the SwiGLU MLP (for FLOPs)")
    add("--num-attention-heads", type=whole_number(1), help="query heads (for FLOPs)")
    add("--num-query-groups", type=whole_number(1), help="key heads; as query heads if not given")
    add("--kv-channels", type=whole_number(1), help="width of a head; h / query heads if not given")
    add(
        "--padded-vocab-size",
        type=whole_number(1),
        metavar="N",
        help="tokens of the output head, whose time the last chunk gets; no head if not given",
    )
    add(
        "--recompute-granularity",
        choices=["none", "selective", "full"],
        help="what backward computes again: nothing, core attention, whole layers; none if not "
        "given",
    )
    add(
        "--depth-attention-share",
        type=not_negative,
        metavar="SHARE",
        help="what both of a layer's reads from depth take, as a share of the layer's time "
        "(share_of_layer of tools/benchmark_depth_attention.py); 0 if not given",
    )
    return _keys(group)


def add_profile_flag(parser: CommandParser) -> None:
    """Add the third source of compute times."""
    parser.add_argument_group("compute times, measured").add_argument(
        "--compute-from",
        metavar="FILE.json",
        help="timelines of tools/profile_pipeline.py: layout, schedule, entry bytes and every "
        "chunk's median times; in place of the flags that say these",
    )


def add_cluster_flags(parser: CommandParser) -> list[str]:
    """Add the links, and which ranks are on which node; return the keys."""
    group = parser.add_argument_group("cluster")
    add = group.add_argument
    add(
        "--bandwidth-between-nodes",
        type=positive,
        metavar="GB/s",
        help="of one rank, each way, in 10^9 bytes a second",
    )
    add(
        "--bandwidth-inside-node",
        type=positive,
        metavar="GB/s",
        help="of one rank, each way, in 10^9 bytes a second",
    )
    add(
        "--latency-between-nodes",
        type=not_negative,
        metavar="US",
        help="of a transfer in microseconds; 10 if not given",
    )
    add(
        "--latency-inside-node",
        type=not_negative,
        metavar="US",
        help="of a transfer in microseconds; 5 if not given",
    )
    add("--ranks-per-node", type=whole_number(1), metavar="N", help="8 if not given")
    add(
        "--data-parallel-size",
        type=whole_number(1),
        metavar="DP",
        help="pipelines; only places ranks on nodes (order TP - DP - P) and counts tokens; 1 if "
        "not given",
    )
    add(
        "--share-link",
        action=argparse.BooleanOptionalAction,
        help="transfers that leave, or reach, a rank at once share its link evenly; without, each "
        "has the whole of it; on if not given",
    )
    return _keys(group)


def _keys(group: argparse._ArgumentGroup) -> list[str]:
    return [action.dest for action in group._group_actions]
