"""Where a value that is not finite came from, on four real ranks: P = 2, V = 2, DP = 2."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, distributed

from megatron_attnres.optimizer.main_gradients import accumulate_in_fp32, main_gradient
from megatron_attnres.parallel.gradients import finish_gradients
from megatron_attnres.parallel.groups import ParallelGroups
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.pipeline.step import PipelineStep
from megatron_attnres.training.forward_step import forward_step
from megatron_attnres.training.metrics import mean_loss_of_batch
from megatron_attnres.training.watching.non_finite import (
    BadGradient,
    BadOutput,
    GradientProbe,
    OutputProbe,
    first_of_all_ranks,
    gradients_in_words,
    outputs_in_words,
)
from megatron_attnres.training.watching.rank_record import host_name
from tests.distributed import restart_job, run_ranks
from tests.layouts import Case, build, microbatches, small_model
from tests.training.planting import parameters_of

# Ranks 0 and 1 run layers 0 and 2, ranks 2 and 3 layers 1 and 3 and the head.
CASE = Case(small_model(4, block_size=3, recency_bias=0.5), ParallelLayout(1, 2, 2, 2))
WHOLE = Case(small_model(4, block_size=8, tied=False), ParallelLayout())


def run_step(
    case: Case, groups: ParallelGroups, step: PipelineStep, forward_only: bool = False
) -> float:
    """The loss, on every rank."""
    batches = microbatches(case, groups.data_rank)
    mark_one_microbatch(batches, groups.data_rank)
    record = step.run(
        forward_step,
        [iter(batches) for _ in step.chunks],
        case.num_microbatches,
        forward_only=forward_only,
    )
    return mean_loss_of_batch(record.losses, groups)


def mark_one_microbatch(batches: list[dict[str, Tensor]], data_rank: int) -> None:
    """Token 63 occurs in micro-batch 2 of data-parallel rank 1 alone, token 1 everywhere."""
    for index, batch in enumerate(batches):
        tokens = batch["tokens"].clamp(max=62)
        tokens[0, 0] = 1
        if (index, data_rank) == (2, 1):
            tokens[-1, -1] = 63
        batch["tokens"] = tokens


# (rank, parameter, value): what is planted, and whose name is to be told.
Planted = tuple[int, str, float]


def gradients_told(case: Case, dtype: torch.dtype, plans: list[list[Planted]]) -> list[str]:
    """Runs on every rank: what is told of each plan's gradients."""
    groups, step = build(case, dtype)
    parameters = parameters_of(step)
    if dtype == torch.bfloat16:
        accumulate_in_fp32(parameters.values())
    probe = GradientProbe(step.chunks, main_gradient)
    told = []
    for plan in plans:
        run_step(case, groups, step)
        for rank, name, value in plan:
            if distributed.get_rank() == rank:
                # Anywhere in it.
                flat = main_gradient(parameters[name]).view(-1)
                flat[len(flat) // 3] = value
        probe.look()
        # What follows spreads bad values, and in the end forgets the gradients.
        finish_gradients(step.chunks, groups.collection, main_gradient)
        for parameter in parameters.values():
            distributed.all_reduce(main_gradient(parameter), group=groups.collection.dp)
            parameter.grad = None
            if dtype == torch.bfloat16:
                parameter.main_grad = None
        told.append(gradients_in_words(first_of_all_ranks(probe.first_bad())))
    restart_job()
    return told


def bad(rank: int, name: str, count: int = 1) -> str:
    """How the sentence begins."""
    return f"gradient not finite, first in {name} on rank {rank} ({host_name()}); {count} of its "


LATE, EARLY = "layers.3.mlp.linear_fc1.weight", "layers.1.attention.linear_qkv.weight"
MIDDLE = "layer 2, layers.2.mlp_norm.weight"
GRADIENTS: list[tuple[list[Planted], str]] = [
    *(
        ([(rank, name, value)], bad(rank, f"layer {name.split('.')[1]}, {name}"))
        for rank, name, value in (
            (3, LATE, math.nan),
            (2, LATE, math.inf),
            (1, "layers.0.attention_reader.recency_bias", -math.inf),
            (0, "layers.2.mlp_reader.query", math.nan),
        )
    ),
    ([(1, "embedding.weight", math.nan)], bad(1, "embedding.weight")),
    ([(3, "final_norm.weight", math.nan)], bad(3, "final_norm.weight")),
    # Backward meets the later chunk first, and in a chunk the later module.
    ([(2, EARLY, math.nan), (3, LATE, math.nan)], bad(3, f"layer 3, {LATE}")),
    ([(1, "layers.2.mlp_norm.weight", math.nan), (2, EARLY, math.nan)], bad(1, MIDDLE)),
    (
        [(3, "layers.3.attention_norm.weight", math.nan), (3, LATE, math.nan)],
        bad(3, f"layer 3, {LATE}", 2),
    ),
    ([], "the gradient's norm is not finite though every gradient is"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_planted_gradient_is_named_on_every_rank(dtype):
    plans = [plan for plan, _ in GRADIENTS]
    everyone = run_ranks(gradients_told, 4, CASE, dtype, plans)
    assert all(told == everyone[0] for told in everyone)
    for (plan, wanted), told in zip(GRADIENTS, everyone[0], strict=True):
        assert told.startswith(wanted), plan
        assert told.endswith(f", {len(plan)} ranks have some") == (
            len({one[0] for one in plan}) > 1
        )


def outputs_told(case: Case, plans: list[list[Planted]]) -> list[tuple[float, str, bool]]:
    """Runs on every rank: loss and what is told of each plan's weights, and if no hook is left."""
    groups, step = build(case, torch.float32)
    parameters = parameters_of(step)
    told = []
    for plan in plans:
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for rank, name, value in plan:
            if distributed.get_rank() == rank:
                # The embedding's rows are tokens.
                parameters[name].data[-1] = value
        loss = run_step(case, groups, step)
        probe = OutputProbe()
        with probe.watch(step.chunks), torch.no_grad():
            run_step(case, groups, step, forward_only=True)
        words = outputs_in_words(first_of_all_ranks(probe.first_bad()))
        told.append((loss, words, not any(has_hooks(chunk) for chunk in step.chunks)))
        for name, parameter in parameters.items():
            parameter.data.copy_(before[name])
            parameter.grad = None
    restart_job()
    return told


def has_hooks(chunk: torch.nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in chunk.modules())


def bad_output(module: str, rank: int, weight: str | None, microbatch: int = 0) -> str:
    layer = f"layer {module.split('.')[1]}, " if module.startswith("layers") else ""
    why = f"; its weight {weight} is not finite" if weight else ""
    return (
        f"loss not finite, first in the output of {layer}{module}, micro-batch {microbatch}, on "
        f"rank {rank} ({host_name()}){why}"
    )


def of_its_own(rank: int, weight: str) -> tuple[list[Planted], str]:
    """A weight whose module puts out the first bad value."""
    return [(rank, weight, math.nan)], bad_output(weight.rpartition(".")[0], rank, weight)


OUTPUTS: list[tuple[list[Planted], str]] = [
    of_its_own(3, "layers.3.mlp.linear_fc2.weight"),
    of_its_own(2, "layers.1.attention.linear_qkv.weight"),
    of_its_own(1, "layers.2.attention_reader.query"),
    of_its_own(0, "layers.0.mlp_reader.key_norm_weight"),
    of_its_own(0, "layers.2.attention.linear_proj.weight"),
    of_its_own(3, "head_reader.query"),
    of_its_own(2, "final_norm.weight"),
    # The earliest of several, on the first rank that has it.
    (
        [(3, "layers.3.mlp_norm.weight", math.nan), (1, "layers.2.mlp_norm.weight", math.nan)],
        bad_output("layers.2.mlp_norm", 1, "layers.2.mlp_norm.weight"),
    ),
    (
        [(2, "layers.1.mlp_norm.weight", math.inf), (3, "layers.1.mlp_norm.weight", math.nan)],
        bad_output("layers.1.mlp_norm", 2, "layers.1.mlp_norm.weight"),
    ),
    # A token that one micro-batch has.
    (
        [(0, "embedding.weight", math.nan), (1, "embedding.weight", math.nan)],
        bad_output("embedding", 1, "embedding.weight", microbatch=2),
    ),
    # The last stage's copy of the embedding.
    ([(3, "embedding.weight", math.nan)], bad_output("output", 3, "embedding.weight")),
    (
        [],
        "loss not finite, but the same forward a second time is: suspect the hardware of a rank",
    ),
]


def test_a_planted_weight_is_named_on_every_rank_though_the_loss_is_bad_everywhere():
    everyone = run_ranks(outputs_told, 4, CASE, [plan for plan, _ in OUTPUTS])
    for (plan, wanted), *told in zip(OUTPUTS, *everyone, strict=True):
        for loss, words, is_clean in told:
            assert math.isfinite(loss) == (not plan), plan
            assert words == wanted
            assert is_clean


def test_a_weight_that_depth_attention_reads_ahead_is_named():
    """With one block, the first layer reads on behalf of all others."""
    names = [
        f"layers.{layer}.{one}_reader.query" for layer in (2, 3) for one in ("attention", "mlp")
    ]
    plans: list[list[Planted]] = [[(0, name, math.nan)] for name in names]
    [told] = run_ranks(outputs_told, 1, WHOLE, plans)
    for name, (_, words, _) in zip(names, told, strict=True):
        assert words == bad_output("layers.0", 0, name)


def test_the_first_of_several_ranks_in_the_order_of_the_model():
    gradient = BadGradient(rank=0, host="a", chunk=1, name="layers.1.x", count=1, of=5)
    found = [gradient, replace(gradient, rank=1, chunk=3, name="layers.3.x"), gradient]
    assert gradients_in_words(found) == (
        "gradient not finite, first in layer 3, layers.3.x on rank 1 (a); 1 of its 5 gradients, 3 "
        "ranks have some"
    )
    output = BadOutput(rank=0, host="a", chunk=2, microbatch=1, name="embedding", weight=None)
    found = [output, replace(output, rank=1, chunk=3, microbatch=0), replace(output, chunk=1)]
    assert "micro-batch 0, on rank 1 (a)" in outputs_in_words(found)
    assert outputs_in_words([replace(output, name="the chunk")]) == (
        "loss not finite, first in the output of the chunk, micro-batch 1, on rank 0 (a)"
    )
