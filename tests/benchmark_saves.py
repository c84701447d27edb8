"""How long training stands still for a save: waiting for the files, or copying the state.

python tests/benchmark_saves.py --model-size 100m --rounds 5

One rank; both ways in turn within a round, training steps in between, medians and ratios.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.model.configuration import NAMED_SIZES
from megatron_attnres.training.quiet import ignore_known_warnings


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-size", choices=sorted(NAMED_SIZES), default="100m")
    parser.add_argument("--tokens", type=int, default=512, help="of the one sequence of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", help="where to save; a temporary folder if not given")
    arguments = parser.parse_args()
    ignore_known_warnings()
    import torch

    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        _measure(arguments, folder)


def _measure(arguments: argparse.Namespace, folder: str) -> None:
    from megatron_attnres.parallel.cpu import import_megatron_core

    import_megatron_core()
    from megatron_attnres.training.benchmark import (
        TrainingStep,
        compared_models,
        single_rank_groups,
    )
    from megatron_attnres.training.checkpoints.configuration import SaveConfig
    from megatron_attnres.training.checkpoints.description import Description, TrainingState
    from megatron_attnres.training.checkpoints.pieces import StatePieces
    from megatron_attnres.training.checkpoints.saving import CheckpointSaver

    groups = single_rank_groups()
    model = compared_models(arguments.model_size, 4, 32_000, arguments.tokens)["ours"]
    training = TrainingStep(model, "fp32", groups)
    training.run()
    pieces = StatePieces(training.step.chunks, training.optimizer, groups)
    savers = {
        "waiting": CheckpointSaver(SaveConfig(f"{folder}/waiting", False), pieces),
        "copying": CheckpointSaver(SaveConfig(f"{folder}/copying", True), pieces),
    }
    if not savers["copying"].is_asynchronous:
        sys.exit("not enough memory for a copy of the state")
    print(f"{sum(piece.tensor.nbytes for piece in pieces.to_write()) / 2**20:.0f} MiB per save")
    pauses: dict[str, list[float]] = {name: [] for name in savers}
    steps: dict[str, list[float]] = {"alone": [], "beside a save": []}
    for index in range(arguments.rounds + 1):
        for name, saver in savers.items():
            steps["alone"].append(_seconds(training.run))
            description = Description(TrainingState(index), 1, {}, {}, {}, "", {}, {}, "")
            pauses[name].append(_seconds(lambda s=saver, d=description: s.start(d)))
            if name == "copying":
                steps["beside a save"].append(_seconds(training.run))
            saver.finish()
    # The first round makes files and pages for the first time.
    for name, seconds in pauses.items():
        print(f"pause, {name:<10} {1e3 * median(seconds[1:]):9.1f} ms")
    ratios = [one / other for one, other in zip(pauses["copying"], pauses["waiting"], strict=True)]
    print(f"copying / waiting {median(ratios[1:]):.3f}")
    for name, seconds in steps.items():
        print(f"step, {name:<14} {1e3 * median(seconds[1:]):6.0f} ms")


def _seconds(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
