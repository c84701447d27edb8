"""What depth attention costs: one read, a training step, a decode step.

python tools/benchmark_depth_attention.py
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.commands import CommandParser, run_command, whole_number
from megatron_attnres.errors import InputError
from megatron_attnres.model.configuration import NAMED_SIZES
from megatron_attnres.optimizer.configuration import DATA_TYPES

PARTS = ("operator", "training-step", "memory", "decode-step")


def main(args: Sequence[str]) -> None:
    """Read the flags, time, print."""
    arguments = _parser().parse_args(args)
    if arguments.hidden_size % 64:
        raise InputError(f"--hidden-size {arguments.hidden_size}: must be a multiple of 64")
    sublayers = 2 * NAMED_SIZES[arguments.model_size].num_layers
    if arguments.num_blocks > sublayers:
        raise InputError(
            f"--num-blocks {arguments.num_blocks}: --model-size {arguments.model_size} has "
            f"{sublayers} sublayers"
        )

    from megatron_attnres.training.quiet import ignore_known_warnings

    ignore_known_warnings()
    import torch

    from megatron_attnres.parallel.cpu import import_megatron_core

    torch.set_num_threads(arguments.threads)
    import_megatron_core()
    rows = _measure(arguments)
    print(json.dumps(rows) if arguments.json else _report(rows))


def _measure(arguments: Any) -> list[dict[str, Any]]:
    """A row for every precision and number of sources."""
    import torch

    from megatron_attnres.depth_attention.benchmark import OperatorCase, benchmark_operator
    from megatron_attnres.parallel.cpu import device
    from megatron_attnres.training import benchmark

    groups = benchmark.single_rank_groups()
    models = benchmark.compared_models(
        arguments.model_size, arguments.num_blocks, arguments.vocab_size, arguments.tokens
    )
    rows = []
    for precision in arguments.precision:
        dtype = getattr(torch, DATA_TYPES[precision])
        whole = {}
        if "training-step" in arguments.parts:
            whole["training_step"] = benchmark.benchmark_training_step(
                models, precision, arguments.rounds, groups
            )
        if "memory" in arguments.parts:
            whole["memory"] = benchmark.benchmark_peak_memory(models, precision, arguments.threads)
        if "decode-step" in arguments.parts:
            whole["decode_step"] = benchmark.benchmark_decode_step(
                models, precision, arguments.context, 20 * arguments.rounds, groups
            )
        for sources in arguments.sources if "operator" in arguments.parts else []:
            case = OperatorCase(
                arguments.hidden_size, arguments.tokens, sources, arguments.sublayers, dtype
            )
            layer = benchmark.baseline_layer(case.hidden, case.tokens, dtype, groups)
            rows.append(benchmark_operator(case, layer, arguments.rounds, device()) | whole)
        if "operator" not in arguments.parts:
            rows.append({"dtype": DATA_TYPES[precision], **whole})
    return rows


def _parser() -> CommandParser:
    parser = CommandParser(
        "Time depth attention: one sublayer's read in turn with the paper's pseudo-code, a "
        "Transformer layer and a plain copy; training and decode steps of a model in turn with "
        "standard residuals."
    )
    add = parser.add_argument_group("one read").add_argument
    add("--hidden-size", type=whole_number(64), default=1024, help="width h; heads are 64 wide")
    add("--tokens", type=whole_number(1), default=1024, help="tokens of the micro-batch")
    add("--sources", type=whole_number(1), nargs="+", default=[9], help="sources read at once")
    add("--sublayers", type=whole_number(1), default=6, help="sublayers per block, S")
    add = parser.add_argument_group("a model's steps").add_argument
    add("--model-size", choices=sorted(NAMED_SIZES), default="100m")
    add("--num-blocks", type=whole_number(1), default=4, help="blocks of the model, N")
    add("--vocab-size", type=whole_number(64), default=32_000, help="of the model")
    add("--context", type=whole_number(1), default=512, help="tokens before the decoded one")
    add = parser.add_argument_group("measuring").add_argument
    add("--parts", choices=PARTS, nargs="+", default=PARTS, help="what to measure")
    add("--precision", choices=["fp32", "bf16"], nargs="+", default=["fp32", "bf16"])
    add("--rounds", type=whole_number(1), default=10, help="timed rounds, after two of warm-up")
    add("--threads", type=whole_number(1), default=2, help="CPU threads")
    add("--json", action="store_true", help="print a JSON list, one object per case")
    return parser


def _report(rows: Sequence[dict[str, Any]]) -> str:
    """For reading: the operator's rows, then the models' steps by precision."""
    lines = []
    reads = [row for row in rows if "ours_ms" in row]
    if reads:
        lines += [
            "one sublayer's read, forward and backward; medians in ms, ratios within a round",
            f"{'':32}{'naive':>8}{'ours':>8}{'layer':>8}{'naive/ours':>12}{'2 x ours/layer':>16}",
        ]
    for row in reads:
        lines += _read_lines(row)
    by_precision = {row["dtype"]: row for row in rows}
    for dtype, row in by_precision.items():
        lines += _step_lines(dtype, row)
    return "\n".join(lines)


def _read_lines(row: dict[str, Any]) -> list[str]:
    name = f"h {row['hidden']}, {row['tokens']} tokens, {row['sources']} {row['dtype']}"
    return [
        f"{name:<32}{row['naive_ms']:>8.1f}{row['ours_ms']:>8.1f}{row['layer_ms']:>8.1f}"
        f"{row['speedup']:>12.1f}{row['share_of_layer']:>15.1%}",
        f"    forward {row['naive_forward_ms']:.1f} and {row['ours_forward_ms']:.1f} ms; at once "
        f"{row['naive_extra_bytes'] / 2**20:.1f} and {row['extra_bytes'] / 2**20:.1f} MiB beside "
        f"the sources",
        f"    ours must move {row['least_bytes'] / 2**20:.1f} MiB: "
        f"{row['bytes_per_second'] / 1e9:.1f} GB/s, a copy reaches "
        f"{row['copy_bytes_per_second'] / 1e9:.1f}",
        *(
            f"    {title} {row[name]:.1f} ms"
            for name, title in (("fla_naive_ms", "fla naive"), ("fused_ms", "fla fused"))
            if name in row
        ),
    ]


def _step_lines(dtype: str, row: dict[str, Any]) -> list[str]:
    lines = []
    if "training_step" in row:
        step = row["training_step"]
        lines.append(
            f"training step, {dtype}: baseline {step['baseline_ms']:.0f} ms, ours "
            f"{step['ours_ms']:.0f} ({step['ratio']:.3f}), pseudo-code {step['naive_ms']:.0f} "
            f"({step['naive_ratio']:.3f})"
        )
    if "memory" in row:
        memory = row["memory"]
        lines.append(
            f"peak memory with full recomputation, {dtype}: baseline "
            f"{memory['baseline_bytes'] / 2**20:.0f} MiB, ours "
            f"{memory['ours_bytes'] / 2**20:.0f} ({memory['ratio']:.3f})"
        )
    if "decode_step" in row:
        step = row["decode_step"]
        lines.append(
            f"decode step, {dtype}: baseline {step['baseline_ms']:.2f} ms, ours "
            f"{step['ours_ms']:.2f} ({step['ratio']:.3f})"
        )
    return lines


if __name__ == "__main__":
    run_command(main)
