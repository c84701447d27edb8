"""Step time of the pipeline policies on one machine, in one interleaved run.

python tests/benchmark_policies.py --hidden 512 --rounds 10

Every round runs one step of each policy in turn, so that a drift of the machine's speed meets all
of them; printed are medians and the median of the ratios within a round.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import distributed

from tests.distributed import run_ranks
from tests.layouts import Case, benchmark_case, build, run_step

POLICIES = {
    "naive": {"policy": "naive", "early_relay": False},
    "naive, early relay": {"policy": "naive", "early_relay": True},
    "cached": {"policy": "cached", "early_relay": False},
    "cached, early relay": {"policy": "cached", "early_relay": True},
}


def step_times(case: Case, rounds: int) -> dict[str, list[float]]:
    """Runs on every rank: seconds of every step by policy."""
    built = {}
    for name, options in POLICIES.items():
        one = replace(case, **options)
        groups, step = build(one, torch.float32, groups=built["naive"][1] if built else None)
        built[name] = (one, groups, step)
    times: dict[str, list[float]] = {name: [] for name in POLICIES}
    for round_index in range(rounds + 2):
        for name, (one, groups, step) in built.items():
            distributed.barrier()
            start = time.perf_counter()
            run_step(one, groups, step)
            distributed.barrier()
            if round_index >= 2:  # the first rounds warm up
                times[name].append(time.perf_counter() - start)
            for chunk in step.chunks:
                chunk.zero_grad()
    return times


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--virtual", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    case = benchmark_case(
        arguments.layers, arguments.hidden, arguments.ranks, arguments.virtual, arguments.block_size
    )
    times = run_ranks(step_times, arguments.ranks, case, arguments.rounds, timeout=1200)[0]
    rows = {
        name: {
            "median_ms": 1e3 * median(times[name]),
            "ratio_to_naive": median(
                one / naive for one, naive in zip(times[name], times["naive"], strict=True)
            ),
        }
        for name in POLICIES
    }
    if arguments.json:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(f"{name:<22}{row['median_ms']:>9.1f} ms  {row['ratio_to_naive']:.3f} of naive")


if __name__ == "__main__":
    main()
