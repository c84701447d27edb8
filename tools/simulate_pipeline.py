"""What Attention Residuals cost a pipeline, predicted for a cluster that need not be at hand.

python tools/simulate_pipeline.py --num-layers 128 --hidden-size 8192 --ffn-hidden-size 28672 \\
    --num-attention-heads 64 --num-query-groups 8 --seq-length 8192 --micro-batch-size 1 \\
    --pipeline-model-parallel-size 16 --virtual-pipeline-model-parallel-size 4 \\
    --tensor-model-parallel-size 8 --sequence-parallel --num-microbatches 64 \\
    --tflops-per-rank 400 --bandwidth-between-nodes 50 --bandwidth-inside-node 400
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.analysis.predictions import flags
from megatron_attnres.analysis.predictions.description import scenario_of
from megatron_attnres.analysis.predictions.scenario import Scenario
from megatron_attnres.analysis.predictions.variants import swept_scenarios
from megatron_attnres.commands import CommandParser, run_command, whole_number
from megatron_attnres.errors import InputError
from megatron_attnres.output_files import check_output_file, write_output_file

MODES = ("block", "full")
POLICIES = {
    "standard": None,
    "naive": ("naive", False),
    "naive-early-relay": ("naive", True),
    "cached": ("cached", False),
    "cached-early-relay": ("cached", True),
}
OUTPUTS = ("plot", "timeline", "trace")


def main(args: Sequence[str]) -> None:
    """Read the flags, predict, print."""
    arguments = _parser().parse_args(args)
    scenario = scenario_of(arguments)
    swept = swept_scenarios(arguments, scenario)
    _check_outputs(arguments, swept)

    # Only now: torch takes seconds to load.
    from megatron_attnres.analysis.predictions.megatron_core import load_schedules

    load_schedules()
    report, text = _predictions(arguments, scenario, swept)
    if arguments.timeline or arguments.trace:
        _write_timeline(arguments, scenario)
    print(json.dumps(report) if arguments.json else text)


def _parser() -> CommandParser:
    parser = CommandParser(
        "Predict a training step on a described cluster: standard residuals against what "
        "Attention Residuals can send, in the order of Megatron-Core's own schedules.",
        epilog="GB are 10^9 bytes, GiB 2^30 bytes. Every assumed value is printed.",
    )
    flags.add_block_flags(parser, num_layers_required=False)
    flags.add_layout_flags(parser)
    flags.add_size_flags(parser)
    flags.add_schedule_flags(parser)
    flags.add_compute_flags(parser)
    flags.add_profile_flag(parser)
    flags.add_cluster_flags(parser)
    add = parser.add_argument_group("what to predict").add_argument
    add("--attn-res-mode", choices=MODES, help="only this mode; both if not given")
    add(
        "--sweep-num-blocks",
        type=whole_number(1),
        nargs="+",
        metavar="N",
        help="besides, step times over numbers of blocks",
    )
    add(
        "--sweep-virtual",
        type=whole_number(1),
        nargs="+",
        metavar="V",
        help="besides, step times over chunks per stage",
    )
    add(
        "--policy",
        choices=POLICIES,
        help="of --timeline and --trace, in --attn-res-mode (block if not given); "
        "cached-early-relay if not given",
    )
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object")
    add("--plot", metavar="FILE.png", help="the sweep: overhead over the number of blocks")
    add("--timeline", metavar="FILE.png", help="the step of --policy as a picture")
    add("--trace", metavar="FILE.json", help="the step of --policy as a Chrome trace")
    return parser


def _check_outputs(arguments: argparse.Namespace, swept: Sequence[Scenario]) -> None:
    for name in OUTPUTS:
        check_output_file(f"--{name}", getattr(arguments, name))
    if arguments.timeline is not None and arguments.timeline == arguments.trace:
        raise InputError(f"--trace {arguments.trace}: is --timeline's file too; give another one")
    if arguments.plot is not None and not swept:
        raise InputError(
            f"--plot {arguments.plot}: draws --sweep-num-blocks or --sweep-virtual; give one"
        )
    if arguments.policy is not None and not (arguments.timeline or arguments.trace):
        raise InputError(f"--policy {arguments.policy}: is for --timeline and --trace; give one")


def _predictions(
    arguments: argparse.Namespace, scenario: Scenario, swept: Sequence[Scenario]
) -> tuple[dict[str, Any], str]:
    """For programs and for people."""
    from megatron_attnres.analysis.predictions import comparison, sweep

    modes = MODES if arguments.attn_res_mode is None else (arguments.attn_res_mode,)
    rows = comparison.compare(scenario, modes)
    report = scenario.as_json() | {"policies": comparison.as_json(rows)}
    parts = [str(scenario), "\n".join(scenario.assumptions.lines()), comparison.as_table(rows)]
    if swept:
        points = sweep.sweep(swept)
        report["sweep"] = sweep.as_json(points)
        parts.append(sweep.as_table(points))
        if arguments.plot:
            from megatron_attnres.analysis.predictions.sweep_picture import draw_sweep

            write_output_file("--plot", arguments.plot, lambda path: draw_sweep(points, path))
    return report, "\n\n".join(parts)


def _write_timeline(arguments: argparse.Namespace, scenario: Scenario) -> None:
    from megatron_attnres.analysis.predictions.timeline_output import predicted_timelines
    from megatron_attnres.pipeline.simulator.workload import Payload
    from megatron_attnres.pipeline.timeline.chrome_trace import chrome_trace
    from megatron_attnres.pipeline.timeline.picture import draw_timeline

    way = POLICIES[arguments.policy or "cached-early-relay"]
    block_size = 1 if arguments.attn_res_mode == "full" else scenario.block_size
    payload = Payload(None) if way is None else Payload(block_size, *way)
    timelines = predicted_timelines(scenario, payload)
    if arguments.timeline:
        write_output_file(
            "--timeline",
            arguments.timeline,
            lambda path: draw_timeline(timelines.steps[0], scenario.layout.pipeline, path),
        )
    if arguments.trace:
        text = json.dumps(chrome_trace(timelines))
        write_output_file("--trace", arguments.trace, lambda path: path.write_text(text))


if __name__ == "__main__":
    run_command(main)
