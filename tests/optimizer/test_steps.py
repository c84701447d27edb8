"""Single steps: missing and infinite gradients, resume, attributes, accumulation in fp32."""

import pytest
import torch
from torch import nn

from megatron_attnres.optimizer.build import build_optimizer
from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.optimizer.main_gradients import main_gradient
from tests.distributed import run_ranks
from tests.optimizer import toy


def _resume(config: OptimizerConfig, groups) -> tuple[list[float], ...]:
    """Losses and norms of steps 3 to 5, of one run and of one saved and loaded in between."""
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    run = toy.train(config, 3, groups)
    saved = [
        {name: tensor.clone() for name, tensor in held.tensors.items()}
        for held in run["optimizer"].state_slices()
    ]

    resumed = toy.make_model(dtype, seed=99)  # the masters alone must bring the weights back
    optimizer = build_optimizer([resumed], config, groups)
    for held, tensors in zip(optimizer.state_slices(), saved, strict=True):
        for name, tensor in tensors.items():
            held.tensors[name].copy_(tensor)
    optimizer.continue_from(run["optimizer"].steps)
    after = toy.train_model(resumed, optimizer, 3, groups, first_step=3)
    straight = toy.train(config, 6, groups)
    return (
        straight["losses"][3:],
        after["losses"],
        [r.grad_norm for r in straight["reports"][3:]],
        [r.grad_norm for r in after["reports"]],
    )


def _infinite_gradient(config: OptimizerConfig, groups) -> dict:
    """One rank's infinity must stop all ranks, and only for that step."""
    model = toy.make_model(torch.bfloat16 if config.precision == "bf16" else torch.float32)
    optimizer = build_optimizer([model], config, groups)
    before = [param.detach().clone() for param in model.parameters()]
    toy.backward(model, 0, groups.dp.rank())
    if groups.dp.rank() == groups.dp.size() - 1:
        main_gradient(next(model.parameters()))[0, 0] = torch.inf
    report = optimizer.step()
    unchanged = all(map(torch.equal, before, model.parameters()))
    toy.backward(model, 1, groups.dp.rank())
    return {"first": report, "unchanged": unchanged, "second": optimizer.step()}


def _missing_gradient(config: OptimizerConfig, groups) -> list[list[float]]:
    """Only the last rank reaches the second layer; nobody reaches the third."""
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    optimizer = build_optimizer([model], config, groups)
    reached = model[:2] if groups.dp.rank() == groups.dp.size() - 1 else model[:1]
    reached(torch.ones(2, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    return [param.flatten().tolist() for param in model.parameters()]


def _many_micro_batches(config: OptimizerConfig, groups) -> float:
    """The norm after gradients of 256 and 256 times 1; in bf16, 256 + 1 is 256."""
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    model = nn.Linear(3, 3, bias=False).to(dtype)
    optimizer = build_optimizer([model], config, groups)
    for factor in [256.0] + [1.0] * 256:
        (model.weight * factor).sum().backward()
    return optimizer.step().grad_norm


def _attributes(config: OptimizerConfig, groups) -> dict:
    """Two chunks that share a parameter, as tied embeddings on one rank do."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    first.weight.tensor_model_parallel = True
    first.bias.requires_grad_(False)
    kept = first.weight
    optimizer = build_optimizer([first, second], config, groups)
    second(first(torch.ones(1, 4))).sum().backward()
    optimizer.step()
    return {
        "same object": first.weight is kept and second.weight is kept,
        "attribute": kept.tensor_model_parallel,
        "grad is none": kept.grad is None,
        "groups": [group["wd_mult"] for group in optimizer.param_groups],
        "state": list(first.state_dict()),
    }


def _job() -> dict:
    groups = toy.make_groups()
    answers = {}
    for precision in ("fp32", "bf16"):
        for stage in (0, 1):
            config = OptimizerConfig(lr=1e-2, precision=precision, zero_stage=stage, clip_grad=0.5)
            answers[precision, stage] = {
                "resume": _resume(config, groups),
                "infinite": _infinite_gradient(config, groups),
                "missing": _missing_gradient(config, groups),
                "many": _many_micro_batches(config, groups),
                "attributes": _attributes(config, groups) if precision == "fp32" else None,
            }
    return answers


@pytest.fixture(scope="module")
def answers() -> list[dict]:
    return run_ranks(_job, 2)


KEYS = [(precision, stage) for precision in ("fp32", "bf16") for stage in (0, 1)]


@pytest.mark.parametrize("key", KEYS)
def test_resume_is_bit_identical(answers, key):
    for rank in answers:
        straight, resumed, straight_norms, resumed_norms = rank[key]["resume"]
        assert resumed == straight
        assert resumed_norms == straight_norms


@pytest.mark.parametrize("key", KEYS)
def test_a_norm_that_is_not_finite_skips_the_step_on_every_rank(answers, key):
    for rank in answers:
        infinite = rank[key]["infinite"]
        assert infinite["first"].skipped and not infinite["first"].clipped
        assert infinite["unchanged"]
        assert not infinite["second"].skipped


@pytest.mark.parametrize("key", KEYS)
def test_micro_batches_are_summed_in_fp32(answers, key):
    norms = [rank[key]["many"] for rank in answers]
    assert norms == pytest.approx([512.0 * 3] * 2, rel=1e-12)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_missing_gradient_counts_as_zero(answers, precision):
    weights = [rank[precision, stage]["missing"] for rank in answers for stage in (0, 1)]
    assert all(each == weights[0] for each in weights)
    third_layer, third_bias = weights[0][4:]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    decayed = torch.tensor(1 - 1e-2 * 0.1, dtype=dtype).item()
    assert third_layer == [decayed] * 9
    assert third_bias == [1.0] * 3


@pytest.mark.parametrize("stage", [0, 1])
def test_parameters_keep_identity_attributes_and_ties(answers, stage):
    for rank in answers:
        found = rank["fp32", stage]["attributes"]
        assert found["same object"] and found["attribute"] and found["grad is none"]
        assert found["groups"] == [1.0, 0.0]
        assert found["state"] == ["weight", "bias"]
