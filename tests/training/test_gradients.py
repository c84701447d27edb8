"""Exactness of the backward pass: every layout gives one process's gradients (float64)."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_attnres.parallel.layout import ParallelLayout
from tests.distributed import run_ranks
from tests.layouts import ZERO, Case, gradients_of_all, relative_error, small_model

TOLERANCE = 1e-10

MODELS = [
    *(small_model(block_size=size) for size in (1, 2, 3, 4, 6)),
    *(small_model(block_size=size, tied=False) for size in (3, 4)),
    small_model(mode="full"),
    small_model(mode="baseline"),
    small_model(block_size=3, recency_bias=0.5),
    small_model(block_size=3, sources="cumulative", recency_bias=0.5),
    small_model(mode="full", sources="cumulative", tied=False),
]


def layouts(world_size: int) -> list[ParallelLayout]:
    """Every layout of so many ranks that four layers allow, V in {1, 2}."""
    found = []
    for tensor, pipeline in product((1, 2), (1, 2, 4)):
        data, rest = divmod(world_size, tensor * pipeline)
        if rest or not 1 <= data <= 3:
            continue
        for virtual in (1, 2) if pipeline == 2 else (1,):
            for sequence in (False, True) if tensor == 2 else (False,):
                found.append(ParallelLayout(tensor, pipeline, virtual, data, sequence))
    return found


def cases(world_size: int) -> list[Case]:
    """All layouts for two models, all models for layouts in turn, and the schedule's options."""
    everywhere = [
        Case(model, layout) for model in (MODELS[2], MODELS[7]) for layout in layouts(world_size)
    ]
    in_turn = [
        Case(model, layouts(world_size)[index % len(layouts(world_size))])
        for index, model in enumerate(MODELS)
    ]
    pipelined = [case for case in everywhere if case.layout.virtual_pipeline > 1]
    options = [
        variant
        for case in pipelined
        for variant in (
            replace(case, overlap=False),
            replace(case, recompute="full"),
            replace(case, recompute="selective", num_microbatches=6),
        )
    ]
    return list(dict.fromkeys([*everywhere, *in_turn, *options]))


# Twelve layers: V = 3 on 2 and 4 stages, blocks that end inside layers and inside chunks.
DEEP = {
    2: [Case(small_model(12, block_size=5), ParallelLayout(1, 2, 3))],
    3: [
        Case(small_model(12, block_size=5), ParallelLayout(1, 3, 1)),
        Case(small_model(12, block_size=7), ParallelLayout(1, 3, 4), num_microbatches=6),
    ],
    4: [
        Case(small_model(12, block_size=5), ParallelLayout(1, 4, 3)),
        Case(small_model(12, block_size=5), ParallelLayout(1, 4, 3), num_microbatches=8),
        Case(small_model(12, mode="full"), ParallelLayout(2, 2, 3, 1, True)),
        Case(small_model(12, mode="baseline"), ParallelLayout(1, 4, 3), overlap=False),
    ],
}


@pytest.fixture(scope="module")
def one_process():
    """Gradients of the same batches on one rank, each computed once."""
    known: dict[Case, dict[str, Tensor]] = {}

    def reference(some_cases: list[Case]) -> list[dict[str, Tensor]]:
        wanted = [case.on_one_process() for case in some_cases]
        missing = list(dict.fromkeys(case for case in wanted if case not in known))
        if missing:
            [found] = run_ranks(gradients_of_all, 1, missing)
            known.update(zip(missing, found, strict=True))
        return [known[case] for case in wanted]

    return reference


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_every_layout_has_the_gradients_of_one_process(world_size, one_process):
    some_cases = cases(world_size) + DEEP.get(world_size, [])
    everyone = run_ranks(gradients_of_all, world_size, some_cases)
    for case, found, wanted in zip(some_cases, everyone[0], one_process(some_cases), strict=True):
        assert found.keys() == wanted.keys(), case
        for name in wanted:
            assert relative_error(found[name], wanted[name]) < TOLERANCE, (name, case)


def test_the_comparison_notices_a_lost_gradient(one_process):
    [wanted] = one_process([Case(MODELS[2], ParallelLayout())])
    name = "layers.2.mlp.linear_fc1.weight"
    broken = wanted[name].clone()
    broken[0, 0] *= 1 + 1e-6
    assert relative_error(broken, wanted[name]) > TOLERANCE


def test_every_depth_parameter_has_a_gradient(one_process):
    [gradients] = one_process([Case(MODELS[10], ParallelLayout())])
    # The first sublayer reads one source: its weight is 1 whatever the query says.
    untouched = {name for name, value in gradients.items() if not value.abs().max() > ZERO}
    assert untouched == {
        f"layers.0.attention_reader.{name}" for name in ("query", "key_norm_weight", "recency_bias")
    }
    assert all(torch.isfinite(value).all() for value in gradients.values())
