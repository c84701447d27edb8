"""What profiling costs: steps with and without the profiler, in turn, in one run.

python tests/benchmark_profiler.py --hidden 256 --rounds 30

Printed are medians and the median of the ratios within a round; the order changes every round.
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import distributed

from tests.distributed import GROUP_TIMEOUT, run_ranks
from tests.layouts import Case, benchmark_case, build, run_step, timeline_layout

WARM_UP = 2


def step_times(case: Case, rounds: int) -> dict[str, list[float]]:
    """Runs on every rank: seconds of every step, by whether it was profiled."""
    from megatron_attnres.pipeline.profiler.profiler import PipelineProfiler

    groups, step = build(case, torch.float32)
    profiler = PipelineProfiler(step, timeline_layout(case), torch.device("cpu"), GROUP_TIMEOUT)
    profiler.begin()
    times: dict[str, list[float]] = {"off": [], "on": []}
    for round_index in range(WARM_UP + rounds):
        for name in ("off", "on") if round_index % 2 else ("on", "off"):
            distributed.barrier()
            start = time.perf_counter()
            with profiler.step(round_index) if name == "on" else nullcontext():
                run_step(case, groups, step)
            distributed.barrier()
            if round_index >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    profiler.end()
    return times


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--virtual", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    case = benchmark_case(arguments.layers, arguments.hidden, arguments.ranks, arguments.virtual)
    times = run_ranks(step_times, arguments.ranks, case, arguments.rounds, timeout=1200)[0]
    ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    result = {
        "off_ms": 1e3 * median(times["off"]),
        "on_ms": 1e3 * median(times["on"]),
        "ratio": median(ratios),
        "rounds": arguments.rounds,
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"step without the profiler {result['off_ms']:.1f} ms, with it {result['on_ms']:.1f} "
            f"ms: {result['ratio']:.3f} (median of {arguments.rounds} pairs)"
        )


if __name__ == "__main__":
    main()
