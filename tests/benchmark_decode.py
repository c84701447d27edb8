"""What a decode step costs in every residual mode, against standard residuals, in one run.

python tests/benchmark_decode.py --rounds 200

One token after a context with a filled key/value cache, random weights. Every round runs one step
of each model in turn, so that a drift of the machine's speed meets all of them; printed are medians
and the median of the ratios within a round.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.model.configuration import NAMED_SIZES, AttnResConfig, ModelConfig
from megatron_attnres.optimizer.configuration import DATA_TYPES
from megatron_attnres.training.quiet import ignore_known_warnings

if TYPE_CHECKING:
    from megatron_attnres.parallel.groups import ParallelGroups


def main() -> None:
    """Measure and print."""
    arguments = _arguments()
    ignore_known_warnings()
    import torch

    from megatron_attnres.parallel.cpu import import_megatron_core

    torch.set_num_threads(arguments.threads)
    import_megatron_core()
    from megatron_attnres.training.benchmark import single_rank_groups

    groups = single_rank_groups()
    rows = [
        _measure(arguments, precision, batch_size, groups)
        for precision in arguments.precision
        for batch_size in arguments.batch_size
    ]
    print(json.dumps(rows) if arguments.json else "\n".join(map(_line, rows)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model-size", choices=sorted(NAMED_SIZES), default="100m")
    add("--num-blocks", type=int, default=4, help="of block mode, N")
    add("--vocab-size", type=int, default=32_000)
    add("--context", type=int, default=512, help="tokens before the decoded one")
    add("--batch-size", type=int, nargs="+", default=[1, 8])
    add("--precision", choices=sorted(DATA_TYPES), nargs="+", default=["fp32"])
    add("--rounds", type=int, default=200)
    add("--threads", type=int, default=2)
    add("--json", action="store_true", help="print a list of objects")
    return parser.parse_args()


def _measure(
    arguments: argparse.Namespace, precision: str, batch_size: int, groups: "ParallelGroups"
) -> dict[str, Any]:
    """One row: milliseconds of a step by model, and its ratio to the baseline's."""
    from megatron_attnres.depth_attention.benchmark import median_ratio, time_in_turn
    from megatron_attnres.parallel.cpu import device
    from megatron_attnres.training.benchmark import compared_models

    compared = compared_models(
        arguments.model_size, arguments.num_blocks, arguments.vocab_size, arguments.context + 1
    )
    baseline, block = compared["baseline"], compared["ours"]
    models = {
        "baseline": baseline,
        f"block N={arguments.num_blocks}": block,
        "full": replace(block, attn_res=AttnResConfig("full", 1)),
    }
    forms = {
        name: _decode_step(model, precision, batch_size, arguments.context, groups)
        for name, model in models.items()
    }
    times = time_in_turn(forms, arguments.rounds, device())
    return {
        "precision": precision,
        "batch_size": batch_size,
        "context": arguments.context,
        "rounds": arguments.rounds,
        "models": {
            name: {"ms": median(times[name]), "ratio": median_ratio(times[name], times["baseline"])}
            for name in forms
        },
    }


def _decode_step(
    model: ModelConfig, precision: str, batch_size: int, context: int, groups: "ParallelGroups"
) -> Callable[[], None]:
    """Decodes the token after the context, again and again."""
    import torch

    from megatron_attnres.model.inference import Decoder
    from megatron_attnres.parallel.cpu import device
    from megatron_attnres.pipeline.schedule import ScheduleConfig
    from megatron_attnres.training.benchmark import SEED
    from megatron_attnres.training.build import build_step

    dtype = getattr(torch, DATA_TYPES[precision])
    schedule = ScheduleConfig(1, overlap_p2p=False, recompute="none")
    step = build_step(model, groups, batch_size, dtype, SEED, schedule)
    decoder = Decoder(step.chunks[0].module, batch_size, max_length=context + 1)
    make = {"dtype": torch.long, "device": device()}
    decoder.next_logits(torch.zeros(batch_size, context, **make))
    token = torch.zeros(batch_size, 1, **make)

    def run() -> None:
        decoder.next_logits(token)
        decoder.cache.length = context

    return run


def _line(row: dict[str, Any]) -> str:
    models = ", ".join(
        f"{name} {one['ms']:.2f} ms ({one['ratio']:.3f})" for name, one in row["models"].items()
    )
    return f"{row['precision']}, batch {row['batch_size']}, context {row['context']}: {models}"


if __name__ == "__main__":
    main()
