"""Hidden dropout: one mask per seed, sample and sublayer, whatever the layout."""

from dataclasses import replace

import pytest
import torch

from megatron_attnres.model.dropout import EMBEDDING, HiddenDropout
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.forward_step import forward_step
from megatron_attnres.training.metrics import mean_loss_of_batch
from tests.distributed import restart_job, run_ranks
from tests.layouts import (
    Case,
    build,
    full_gradients,
    microbatches,
    relative_error,
    run_step,
    small_model,
)

TOLERANCE = 1e-10
DROPOUT = HiddenDropout(0.2, seed=7, samples=(3, 8))
# The step's place in the data order.
FIRST_SAMPLE = 40


def mask(dropout, sublayer=0, shape=(64, 2, 32)):
    """Where something is dropped, [s, b, h]."""
    return dropout.drop(torch.ones(shape, dtype=torch.float64), sublayer) == 0


def test_the_same_key_has_the_same_mask_whatever_was_drawn_before():
    before = torch.random.get_rng_state()
    first = mask(DROPOUT)
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator is left alone"
    torch.rand(5)
    assert torch.equal(mask(replace(DROPOUT)), first)


def test_other_seeds_and_sublayers_have_other_masks():
    masks = [
        mask(DROPOUT),
        mask(DROPOUT, 1),
        mask(DROPOUT, EMBEDDING),
        mask(replace(DROPOUT, seed=8)),
    ]
    for index, one in enumerate(masks):
        for other in masks[:index]:
            # Independent masks of probability 0.2 differ in 2 x 0.2 x 0.8 of their places.
            assert (one != other).double().mean().item() == pytest.approx(0.32, abs=0.04)


def test_a_sample_has_its_mask_in_any_micro_batch():
    third, eighth = mask(DROPOUT).unbind(dim=1)
    assert not torch.equal(third, eighth)
    swapped = mask(replace(DROPOUT, samples=(8, 3)))
    assert torch.equal(swapped, torch.stack([eighth, third], dim=1))
    alone = mask(replace(DROPOUT, samples=(8,)), shape=(64, 1, 32))
    assert torch.equal(alone[:, 0], eighth)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_a_share_is_dropped_and_the_rest_scaled_up(probability):
    hidden = torch.rand(128, 2, 64, dtype=torch.float64, requires_grad=True)
    dropped = replace(DROPOUT, probability=probability).drop(hidden, 0)
    kept = dropped != 0
    assert kept.double().mean().item() == pytest.approx(1 - probability, abs=0.02)
    torch.testing.assert_close(dropped[kept], hidden[kept] / (1 - probability))
    dropped.sum().backward()
    torch.testing.assert_close(hidden.grad, kept / (1 - probability), check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_does_not_depend_on_the_data_type(dtype):
    dropped = DROPOUT.drop(torch.ones(64, 2, 32, dtype=dtype), 0)
    assert dropped.dtype == dtype
    assert torch.equal(dropped == 0, mask(DROPOUT))


@pytest.mark.parametrize("shards", [2, 4])
def test_a_rank_of_sequence_parallelism_has_its_part_of_the_mask(shards):
    parts = [
        mask(replace(DROPOUT, shard=shard, num_shards=shards), shape=(64 // shards, 2, 32))
        for shard in range(shards)
    ]
    assert torch.equal(torch.cat(parts), mask(DROPOUT))


def model(probability=0.2, **changed):
    return replace(small_model(block_size=3, **changed), hidden_dropout=probability)


MODELS = {mode: model(mode=mode) for mode in ("baseline", "block", "full")}


def steps_of(cases, first_sample=FIRST_SAMPLE):
    """Runs on every rank: each case's loss, and its gradients by name."""
    found = []
    for case in cases:
        groups, step = build(case, torch.float64)
        record = run_step(case, groups, step, first_sample=first_sample)
        found.append((mean_loss_of_batch(record.losses, groups), full_gradients(groups, step)))
        restart_job()
    return found


def assert_same(found, wanted, case):
    assert found[0] == pytest.approx(wanted[0], rel=TOLERANCE), case
    assert found[1].keys() == wanted[1].keys(), case
    for name, gradient in wanted[1].items():
        assert relative_error(found[1][name], gradient) < TOLERANCE, (name, case)


@pytest.fixture(scope="module")
def one_process():
    """Loss and gradients of every mode on one rank."""
    cases = [Case(one, ParallelLayout()) for one in MODELS.values()]
    [found] = run_ranks(steps_of, 1, cases)
    return dict(zip(MODELS, found, strict=True))


@pytest.mark.parametrize("mode", MODELS)
def test_every_layout_drops_what_one_process_drops(mode, one_process):
    one = MODELS[mode]
    cases = [
        Case(one, ParallelLayout(pipeline=2, virtual_pipeline=2)),
        Case(one, ParallelLayout(pipeline=2, virtual_pipeline=2), recompute="full"),
        # Half the micro-batches on each rank make the same global batch.
        Case(one, ParallelLayout(data=2), num_microbatches=2),
        Case(one, ParallelLayout(tensor=2)),
        Case(one, ParallelLayout(tensor=2, sequence_parallel=True)),
        Case(one, ParallelLayout(tensor=2, sequence_parallel=True), recompute="full"),
    ]
    for case, found in zip(cases, run_ranks(steps_of, 2, cases)[0], strict=True):
        assert_same(found, one_process[mode], case)


def test_all_kinds_of_parallelism_together(one_process):
    layout = ParallelLayout(1, pipeline=2, virtual_pipeline=2, data=2)
    cases = [
        Case(MODELS["block"], layout, num_microbatches=2, recompute="selective"),
        Case(MODELS["block"], ParallelLayout(2, 2, 2, 1, True), recompute="full"),
    ]
    for case, found in zip(cases, run_ranks(steps_of, 4, cases)[0], strict=True):
        assert_same(found, one_process["block"], case)


def test_neither_micro_batch_size_nor_recomputation_matters(one_process):
    cases = [
        Case(MODELS["block"], ParallelLayout(), num_microbatches, size, recompute)
        for num_microbatches, size in ((4, 2), (2, 4), (8, 1))
        for recompute in ("none", "selective", "full")
    ]
    for case, found in zip(cases, run_ranks(steps_of, 1, cases)[0], strict=True):
        assert_same(found, one_process["block"], case)


def losses_of_steps():
    """Runs on one rank: losses of steps that drop and of steps that do not."""
    losses = {}
    for name, probability, first_sample in (
        ("none", 0.0, None),
        ("probability 0", 0.0, FIRST_SAMPLE),
        ("no samples", 0.2, None),
        ("dropout", 0.2, FIRST_SAMPLE),
        ("later samples", 0.2, FIRST_SAMPLE + 8),
    ):
        [(losses[name], _)] = steps_of([Case(model(probability), ParallelLayout())], first_sample)
    case = Case(model(), ParallelLayout())
    groups, step = build(case, torch.float64)
    with torch.no_grad():
        record = step.run(forward_step, [iter(microbatches(case, 0))], 4, forward_only=True)
    losses["validation"] = mean_loss_of_batch(record.losses, groups)
    return losses


def test_only_training_steps_drop_and_later_steps_drop_something_else():
    [losses] = run_ranks(losses_of_steps, 1)
    plain = losses.pop("none")
    assert losses.pop("probability 0") == losses.pop("no samples") == plain
    assert losses.pop("validation") == plain
    assert len({plain, *losses.values()}) == 3
