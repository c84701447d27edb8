"""Training on any layout follows one process: losses, gradient norms, weights at the start."""

from dataclasses import replace

import pytest
import torch
from torch import distributed

from megatron_attnres.optimizer.build import build_optimizer
from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.optimizer.main_gradients import main_gradient
from megatron_attnres.parallel.gradients import finish_gradients
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.forward_step import forward_step
from megatron_attnres.training.metrics import mean_loss_of_batch
from tests.distributed import restart_job, run_ranks
from tests.layouts import Case, build, full_parameters, microbatches, small_model

STEPS = 20
# Of runs that are compared to the last bit, or nearly: AdamW's state and the moved weights carry a
# difference in one step into all later ones.
EXACT_STEPS = 8
MODEL = replace(small_model(12, block_size=5), init_method_std=0.05)
OPTIMIZER = OptimizerConfig(lr=1e-3, clip_grad=1.0)


def train(
    case: Case, optimizer_config: OptimizerConfig, dtype: torch.dtype, steps: int
) -> tuple[list[float], list[float], float]:
    """Losses, gradient norms and the share of optimizer state of a short run."""
    groups, step = build(case, dtype)
    try:
        optimizer = build_optimizer(step.chunks, optimizer_config, groups.collection)
        losses, norms = [], []
        for seed in range(steps):
            batches = microbatches(case, groups.data_rank, seed)
            record = step.run(
                forward_step, [iter(batches) for _ in step.chunks], case.num_microbatches
            )
            finish_gradients(step.chunks, groups.collection, main_gradient)
            norms.append(optimizer.step().grad_norm)
            losses.append(mean_loss_of_batch(record.losses, groups))
        return losses, norms, optimizer.optimizer_state_fraction()
    finally:
        restart_job()


def train_all(jobs: list[tuple[Case, OptimizerConfig, torch.dtype, int]]) -> list:
    """Runs on every rank."""
    return [train(*job) for job in jobs]


def run(
    world_size: int,
    *cases: Case,
    config: OptimizerConfig = OPTIMIZER,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
):
    """Rank 0's results of every case."""
    return run_ranks(train_all, world_size, [(case, config, dtype, steps) for case in cases])[0]


def close(found: list[float], wanted: list[float], tolerance: float) -> bool:
    return all(
        abs(one - other) <= tolerance * abs(other) for one, other in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("data", [1, 2])
def test_losses_do_not_depend_on_the_pipeline(data):
    microbatches_per_rank = 8 // data

    def case(pipeline: int, virtual: int) -> Case:
        return Case(MODEL, ParallelLayout(1, pipeline, virtual, data), microbatches_per_rank)

    [(losses, norms, _)] = run(data, case(1, 1))
    piped = [
        *run(2 * data, case(2, 1), case(2, 2), case(2, 3)),
        *run(4 * data, case(4, 1), case(4, 3)),
    ]
    for found_losses, found_norms, _ in piped:
        assert found_losses[0] == losses[0], "first loss, to the last bit"
        assert close(found_losses, losses, 1e-5)
        assert close(found_norms[:1], norms[:1], 1e-6)
    assert losses[-1] < losses[0], "the comparison is of a run that learns"


DEEP_LAYOUTS = {2: [ParallelLayout(1, 2, 1), ParallelLayout(1, 2, 3)], 4: [ParallelLayout(1, 4, 3)]}


@pytest.mark.parametrize("tied", [False, True])
def test_the_naive_pipeline_is_one_process_to_the_last_bit(tied):
    """Without clipping, whose norm is summed over stages. A cache sums gradients in its own order.

    The gradient of tied embeddings is a sum over two stages, in another order than one process's.
    """
    model = replace(MODEL, tied_embeddings=tied)
    config = replace(OPTIMIZER, clip_grad=0.0)
    whole = Case(model, ParallelLayout(), 8)
    [(losses, _, _)] = run(1, whole, config=config, steps=EXACT_STEPS)
    [(still, _, _)] = run(1, whole, config=replace(config, lr=1e-9), steps=3)
    assert not close(losses[1:3], still[1:], 1e-4), "the weights move"
    for world_size, some in DEEP_LAYOUTS.items():
        naive = [Case(model, one, 8, policy="naive", early_relay=False) for one in some]
        cached = [Case(model, one, 8) for one in some]
        results = run(world_size, *naive, *cached, config=config, steps=EXACT_STEPS)
        for case, (found, _, _) in zip(naive + cached, results, strict=True):
            if case.policy == "naive" and not tied:
                assert found == losses, case.layout
            assert close(found, losses, 1e-6), case.layout


def test_losses_do_not_depend_on_tensor_parallelism():
    plain = Case(MODEL, ParallelLayout())
    [(losses, norms, _)] = run(1, plain)
    split = [Case(MODEL, ParallelLayout(2, 2, 3, 1, sequence)) for sequence in (False, True)]
    for found_losses, found_norms, _ in run(4, *split):
        assert close(found_losses[-1:], losses[-1:], 1e-5)
        # Tensor parallelism adds up every product in two halves. AdamW's first steps, which divide
        # by moments that are still near zero, magnify that rounding now and then.
        assert close(found_losses, losses, 1e-4)
        assert close(found_norms[:1], norms[:1], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_1_trains_like_stage_0_and_shares_the_state(dtype):
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    case = Case(MODEL, ParallelLayout(1, 2, 2, 2))
    config = replace(OPTIMIZER, precision=precision)
    jobs = [(case, replace(config, zero_stage=stage), dtype, STEPS) for stage in (1, 0)]
    results = run_ranks(train_all, 4, jobs)[0]
    (sharded, sharded_norms, fraction), (whole, norms, everything) = results
    assert close(sharded, whole, 1e-6)
    assert close(sharded_norms, norms, 1e-5)
    assert everything == 1.0
    # Parameters start at multiples of 16 bytes: a few elements of padding in a model this small.
    assert fraction == pytest.approx(0.5, abs=0.01)


def test_bf16_follows_fp32():
    case = Case(MODEL, ParallelLayout(1, 2, 2, 1))
    [(wide, _, _)] = run(2, case)
    [(narrow, _, _)] = run(
        2, case, config=replace(OPTIMIZER, precision="bf16"), dtype=torch.bfloat16
    )
    assert close(narrow, wide, 0.02)


def initial_parameters(cases: list[Case]) -> list[dict]:
    """Runs on every rank."""
    found = []
    for case in cases:
        groups, step = build(case, torch.float32)
        found.append(full_parameters(groups, step))
        restart_job()
    return found


def test_initial_weights_depend_on_seed_and_name_alone():
    model = replace(MODEL, tied_embeddings=False)
    layouts = [
        ParallelLayout(1, 4, 3),
        ParallelLayout(2, 2, 1),
        ParallelLayout(2, 2, 3, 1, True),
        ParallelLayout(4, 1, 1),
    ]
    model = replace(model, num_query_groups=4)
    [wanted] = run_ranks(initial_parameters, 1, [Case(model, ParallelLayout())])[0]
    for found in run_ranks(initial_parameters, 4, [Case(model, one) for one in layouts])[0]:
        assert found.keys() == wanted.keys()
        for name, parameter in wanted.items():
            assert torch.equal(found[name], parameter), name


def tied_copies() -> bool:
    """Runs on two ranks: is the last stage's output weight the first stage's embedding?"""
    case = Case(MODEL, ParallelLayout(1, 2, 1))
    groups, step = build(case, torch.float32)
    optimizer = build_optimizer(step.chunks, OPTIMIZER, groups.collection)
    chunk = step.chunks[0]
    for seed in range(3):
        batches = microbatches(case, 0, seed)
        step.run(forward_step, [iter(batches)], case.num_microbatches)
        finish_gradients(step.chunks, groups.collection, main_gradient)
        optimizer.step()
    weight = chunk.module.embedding.weight if chunk.is_first else chunk.module.output.weight
    copies = [torch.empty_like(weight) for _ in range(2)]
    distributed.all_gather(copies, weight.detach())
    return torch.equal(*copies)


def test_tied_copies_stay_equal():
    assert run_ranks(tied_copies, 2) == [True, True]
