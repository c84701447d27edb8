"""ZeRO-1 against replicated state, and both against plain PyTorch on one process."""

import pytest
import torch
from torch import nn

from megatron_attnres.optimizer import zero
from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.optimizer.deepspeed_runtime import start_deepspeed
from megatron_attnres.optimizer.main_gradients import accumulate_in_fp32
from megatron_attnres.optimizer.parameter_groups import parameter_groups
from megatron_attnres.optimizer.zero import ZeroOptimizer
from tests.distributed import run_ranks
from tests.optimizer import toy

STEPS = 20
LR, DECAY = 1e-2, 0.1


def _config(**changes) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": LR, "weight_decay": DECAY, "clip_grad": 0.5, **changes})


def _plain_pytorch(data_ranks: int) -> list[float]:
    """All ranks' micro-batches on one process, torch.optim.AdamW, torch's clipping."""
    model = toy.make_model()
    groups = parameter_groups(model.named_parameters(), DECAY)
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(STEPS):
        losses.append(sum(toy.backward(model, step, r) for r in range(data_ranks)) / data_ranks)
        for param in model.parameters():
            param.grad /= data_ranks
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adamw.step()
        adamw.zero_grad()
    return losses


def _offloaded(groups, config: OptimizerConfig) -> list[float]:
    """The offloading code path; on this host the "device" it offloads from is the CPU too."""
    start_deepspeed()
    model = toy.make_model(torch.bfloat16 if config.precision == "bf16" else torch.float32)
    named = list(model.named_parameters())
    if config.precision == "bf16":
        accumulate_in_fp32(model.parameters())
    names = {param: name for name, param in named}
    optimizer = ZeroOptimizer(parameter_groups(named, DECAY), names, config, groups)
    return toy.train_model(model, optimizer, STEPS, groups)["losses"]


def _elements_of_state(optimizer: ZeroOptimizer) -> list[int]:
    """Sizes of every master weight and moment that AdamW really holds."""
    states = optimizer._adamw.state.items()
    return [
        tensor.numel() for master, state in states
        for tensor in (master, state["exp_avg"], state["exp_avg_sq"])
    ]  # fmt: skip


def _job() -> dict:
    groups = toy.make_groups()
    runs = {
        (precision, stage): toy.train(_config(precision=precision, zero_stage=stage), STEPS, groups)
        for precision in ("fp32", "bf16")
        for stage in (0, 1)
    }
    optimizer = runs["fp32", 1].pop("optimizer")
    elements = sum(weight.numel() for weight in runs["fp32", 1]["weights"])
    zero.BUCKET_ELEMENTS = 50  # several buckets, and parameters larger than one
    small_buckets = toy.train(_config(), STEPS, groups)["losses"]
    return {
        "runs": {key: (run["losses"], run["reports"]) for key, run in runs.items()},
        "small_buckets": small_buckets,
        "offloaded": {
            precision: _offloaded(groups, _config(zero_cpu_offload=True, precision=precision))
            for precision in ("fp32", "bf16")
        },
        "fraction": optimizer.optimizer_state_fraction(),
        "replicated_fraction": runs["fp32", 0]["optimizer"].optimizer_state_fraction(),
        "counted_fraction": sum(_elements_of_state(optimizer)) / (3 * elements),
        "elements": elements,
        "plain": _plain_pytorch(groups.dp.size()),
    }


@pytest.fixture(scope="module", params=[1, 2, 3])
def data_parallel(request) -> tuple[int, list[dict]]:
    return request.param, run_ranks(_job, request.param)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_zero_gives_the_losses_and_norms_of_replicated_state(data_parallel, precision):
    _, (first, *_) = data_parallel
    losses_0, reports_0 = first["runs"][precision, 0]
    losses_1, reports_1 = first["runs"][precision, 1]
    assert losses_1 == pytest.approx(losses_0, abs=1e-6)
    norms = [[r.grad_norm for r in reports] for reports in (reports_0, reports_1)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert any(r.clipped for r in reports_1) and not all(r.clipped for r in reports_1)
    assert [r.clipped for r in reports_1] == [r.clipped for r in reports_0]


def test_zero_gives_the_losses_of_plain_pytorch(data_parallel):
    _, (first, *_) = data_parallel
    assert first["runs"]["fp32", 1][0] == pytest.approx(first["plain"], abs=1e-6)


def test_ranks_report_the_same_norm(data_parallel):
    _, ranks = data_parallel
    assert all(rank["runs"] == ranks[0]["runs"] for rank in ranks)


def test_buckets_and_offloading_change_nothing(data_parallel):
    _, (first, *_) = data_parallel
    assert first["small_buckets"] == pytest.approx(first["runs"]["fp32", 1][0], abs=1e-6)
    for precision, losses in first["offloaded"].items():
        assert losses == pytest.approx(first["runs"][precision, 1][0], abs=1e-6)


def test_state_fraction_is_one_over_data_parallel_size(data_parallel):
    size, ranks = data_parallel
    for rank in ranks:
        assert rank["replicated_fraction"] == 1.0
        assert rank["fraction"] == rank["counted_fraction"]
        # Padding: 3 elements between parameters, 2 * size at the end of each of the 2 groups.
        padding = (6 * 3 + 2 * 2 * size) / size / rank["elements"]
        assert 1 / size <= rank["fraction"] <= 1 / size + padding
