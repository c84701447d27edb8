"""How long depth attention takes, beside the paper's pseudo-code, a layer and the memory bus.

python tools/benchmark_depth_attention.py --hidden-size 1024 --tokens 1024 --sources 9
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.commands import CommandParser, run_command, whole_number
from megatron_attnres.errors import InputError

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def main(args: Sequence[str]) -> None:
    """Read the flags, time, print."""
    arguments = _parser().parse_args(args)
    if arguments.hidden_size % 64:
        raise InputError(f"--hidden-size {arguments.hidden_size}: must be a multiple of 64")

    from megatron_attnres.training.quiet import ignore_known_warnings

    ignore_known_warnings()
    import torch

    from megatron_attnres.parallel.cpu import device, import_megatron_core

    torch.set_num_threads(arguments.threads)
    import_megatron_core()
    from megatron_attnres.depth_attention.benchmark import OperatorCase, benchmark_operator
    from megatron_attnres.training.benchmark import baseline_layer, single_rank_groups

    groups = single_rank_groups()
    rows = []
    for precision in arguments.precision:
        dtype = getattr(torch, DTYPES[precision])
        for sources in arguments.sources:
            case = OperatorCase(arguments.hidden_size, arguments.tokens, sources, dtype)
            layer = baseline_layer(case.hidden, case.tokens, dtype, groups)
            rows.append(benchmark_operator(case, layer, arguments.rounds, device()))
    print(json.dumps(rows) if arguments.json else _table(rows))


def _parser() -> CommandParser:
    parser = CommandParser(
        "Time one read of the depth state: in turn with the paper's pseudo-code, a Transformer "
        "layer and a plain copy of the sources."
    )
    add = parser.add_argument_group("sizes").add_argument
    add("--hidden-size", type=whole_number(64), default=1024, help="width h; heads are 64 wide")
    add("--tokens", type=whole_number(1), default=1024, help="tokens of the micro-batch")
    add("--sources", type=whole_number(1), nargs="+", default=[9], help="sources read at once")
    add("--precision", choices=sorted(DTYPES), nargs="+", default=["fp32", "bf16"])
    add = parser.add_argument_group("measuring").add_argument
    add("--rounds", type=whole_number(1), default=10, help="timed rounds, after one of warm-up")
    add("--threads", type=whole_number(1), default=2, help="CPU threads")
    add("--json", action="store_true", help="print a JSON list, one object per case")
    return parser


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "one read, forward and backward; medians in ms, ratios within a round",
        f"{'':28}{'naive':>9}{'ours':>8}{'layer':>8}{'naive/ours':>12}{'2 x ours/layer':>16}",
    ]
    for row in rows:
        name = f"h {row['hidden']}, {row['tokens']} tokens, {row['sources']} {row['dtype']}"
        lines.append(
            f"{name:<28}{row['naive_ms']:>9.1f}{row['ours_ms']:>8.1f}{row['layer_ms']:>8.1f}"
            f"{row['speedup']:>12.1f}{row['share_of_layer']:>15.1%}"
        )
        lines.append(
            f"{'':4}forward {row['naive_forward_ms']:.1f} and {row['ours_forward_ms']:.1f} ms; "
            f"kept beside the sources {row['extra_bytes'] / 2**20:.1f} MiB; "
            f"{row['bytes_per_second'] / 1e9:.1f} of {row['copy_bytes_per_second'] / 1e9:.1f} GB/s"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
