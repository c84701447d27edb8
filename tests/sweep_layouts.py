"""Gradients and bytes of random layouts against one process and the plan, in float64.

python tests/sweep_layouts.py [--layouts 60] [--seed 0]
"""

import argparse
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

from megatron_attnres.parallel.layout import ParallelLayout
from tests.distributed import run_ranks
from tests.layouts import Case, gradients_of_all, relative_error, small_model

MOST_RANKS = 4
MOST_LAYERS = 16
MOST_MICROBATCHES = 12
TOLERANCE = 1e-12


class Difference(NamedTuple):
    """The parameter of a case that is furthest from one process."""

    error: float
    parameter: str
    case: Case


def random_case(dice: random.Random) -> Case:
    """A layout of at most four ranks with everything else drawn as well."""
    pipeline = dice.choice([1, 2, 2, 2, 3, 3, 4, 4])
    tensor = dice.choice([size for size in (1, 2) if size * pipeline <= MOST_RANKS])
    data = dice.choice([size for size in (1, 2) if size * tensor * pipeline <= MOST_RANKS])
    virtual = dice.randint(1, 4) if pipeline > 1 else 1
    chunks = pipeline * virtual
    layers = _layers(dice, chunks)
    group, microbatches = _microbatches(dice, pipeline, virtual)
    mode = dice.choice(["block"] * 6 + ["full", "baseline"])
    depth_attention = mode != "baseline"
    model = small_model(
        sum(layers),
        mode,
        dice.randint(1, 2 * sum(layers) + 1),
        dice.choice(["delta", "cumulative"]) if depth_attention else "delta",
        dice.choice([None, 0.5]) if depth_attention else None,
        tied=dice.random() < 0.5,
    )
    even = len(set(layers)) == 1 and dice.random() < 0.5
    policy, early_relay = dice.choice(
        [("cached", True)] * 5 + [("cached", False), ("naive", True), ("naive", False)]
    )
    return Case(
        model,
        ParallelLayout(
            tensor,
            pipeline,
            virtual,
            data,
            tensor > 1 and dice.random() < 0.5,
            None if even else layers,
        ),
        microbatches,
        dice.choice([1, 2]),
        dice.choice(["none", "selective", "full"]),
        dice.random() < 0.5,
        policy,
        early_relay,
        group,
    )


def _layers(dice: random.Random, chunks: int) -> tuple[int, ...]:
    """Two to sixteen layers: equal chunks, or any, the first and the last perhaps empty."""
    if chunks == 1 or dice.random() < 0.4:
        most = MOST_LAYERS // chunks
        return (dice.randint(max(1, 2 // chunks), most),) * chunks
    layers = [1] * chunks
    if dice.random() < 0.4:
        layers[0] = 0
    if chunks > 3 and dice.random() < 0.4:
        layers[-1] = 0
    filled = [index for index, count in enumerate(layers) if count]
    for _ in range(dice.randint(max(0, 2 - sum(layers)), MOST_LAYERS - sum(layers))):
        layers[dice.choice(filled)] += 1
    return tuple(layers)


def _microbatches(dice: random.Random, pipeline: int, virtual: int) -> tuple[int, int]:
    """Micro-batches per virtual stage's turn, and in all: any that the schedule takes."""
    if virtual == 1:
        return pipeline, dice.randint(1, MOST_MICROBATCHES)
    microbatches = dice.randint(pipeline, MOST_MICROBATCHES)
    groups = [
        group
        for group in range(pipeline, microbatches + 1)
        if microbatches % group == 0 or microbatches % group >= pipeline
    ]
    return dice.choice(groups), microbatches


def random_cases(count: int, seed: int) -> list[Case]:
    """The same cases for the same seed."""
    dice = random.Random(seed)
    return [random_case(dice) for _ in range(count)]


def differences(cases: list[Case]) -> list[Difference]:
    """The largest error of every case, relative to the largest element of its parameter.

    The bytes of every rank are held against the plan on the way.
    """

    def gradients(ranks: int, some: list[Case]) -> list[dict[str, Tensor]]:
        return run_ranks(gradients_of_all, ranks, some, timeout=60 + 10 * len(some))[0]

    by_size: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        by_size[case.layout.world_size].append(case)
    cases = [case for _, some in sorted(by_size.items()) for case in some]
    found = [one for size, some in sorted(by_size.items()) for one in gradients(size, some)]
    wanted = gradients(1, [case.on_one_process() for case in cases])
    return list(map(_worst, cases, found, wanted))


def _worst(case: Case, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Difference:
    assert found.keys() == wanted.keys(), case
    found, wanted = _with_one_bias(found), _with_one_bias(wanted)
    errors = [(relative_error(found[name], wanted[name]), name) for name in wanted]
    return Difference(*max(errors), case)


def _with_one_bias(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """All recency biases as one tensor.

    The gradient of a scalar is one sum over all tokens, whose terms may cancel; alone it has no
    larger element that its rounding could be measured by.
    """
    biases = {name: value for name, value in gradients.items() if name.endswith("recency_bias")}
    rest = {name: value for name, value in gradients.items() if name not in biases}
    if biases:
        rest["recency_bias of all readers"] = torch.stack([biases[name] for name in sorted(biases)])
    return rest


def main() -> bool:
    """Print the worst errors; returns whether all layouts were within the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", type=int, default=60, help="how many (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the layouts (default 0)")
    options = parser.parse_args()
    start = time.monotonic()
    found = differences(random_cases(options.layouts, options.seed))
    found.sort(key=lambda difference: -difference.error)
    for error, name, case in found[:10]:
        print(f"{error:.1e}  {name}  {case}")
    seconds = time.monotonic() - start
    print(
        f"{len(found)} layouts, bytes as planned, worst relative error {found[0].error:.1e}, "
        f"{seconds:.0f} s"
    )
    return found[0].error < TOLERANCE


if __name__ == "__main__":
    sys.exit(not main())
