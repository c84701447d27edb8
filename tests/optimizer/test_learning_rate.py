import math
from types import SimpleNamespace

import pytest

from megatron_attnres.errors import InputError
from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.optimizer.learning_rate import (
    build_learning_rate_scheduler,
    current_learning_rate,
)


def _optimizer() -> SimpleNamespace:
    return SimpleNamespace(param_groups=[{"wd_mult": 1.0}, {"wd_mult": 0.0}])


def _curve(points: list[int], **changes) -> list[float]:
    config = OptimizerConfig(
        **{"lr": 1.0, "min_lr": 0.1, "lr_warmup_iters": 10, "lr_decay_iters": 110, **changes}
    )
    rates = []
    for point in points:
        optimizer = _optimizer()
        build_learning_rate_scheduler(optimizer, config).step(point)
        rates.append(current_learning_rate(optimizer))
    return rates


@pytest.mark.parametrize(
    ("style", "middle", "end"),
    [
        ("constant", 1.0, 1.0),
        ("linear", 0.55, 0.1),
        ("cosine", 0.55, 0.1),
        ("WSD", 1.0, 0.1),
    ],
)
def test_warm_up_middle_and_end(style, middle, end):
    rates = _curve([0, 5, 10, 60, 110, 111], lr_decay_style=style, lr_wsd_decay_iters=20)
    assert rates == pytest.approx([0.0, 0.5, 1.0, middle, end, end])


@pytest.mark.parametrize(
    ("style", "halfway"),
    [("linear", 0.5), ("cosine", 0.5), ("minus_sqrt", 1 - math.sqrt(0.5)), ("exponential", 0.4142)],
)
def test_wsd_decay_styles(style, halfway):
    (rate,) = _curve([100], lr_decay_style="WSD", lr_wsd_decay_iters=20, lr_wsd_decay_style=style)
    assert rate == pytest.approx(0.1 + 0.9 * halfway, rel=1e-3)


def test_weight_decay_stays_off_where_it_is_off():
    optimizer = _optimizer()
    scheduler = build_learning_rate_scheduler(optimizer, OptimizerConfig(lr_decay_iters=9))
    scheduler.step(3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_resume_keeps_the_step_and_takes_the_configured_curve():
    first = build_learning_rate_scheduler(_optimizer(), OptimizerConfig(lr=1.0, lr_decay_iters=100))
    first.step(40)
    optimizer = _optimizer()
    longer = OptimizerConfig(lr=1.0, lr_decay_iters=80, lr_decay_style="linear")
    resumed = build_learning_rate_scheduler(optimizer, longer)
    resumed.load_state_dict(first.state_dict())
    assert current_learning_rate(optimizer) == pytest.approx(0.5)
    resumed.step(1)
    assert current_learning_rate(optimizer) == pytest.approx(1 - 41 / 80)


@pytest.mark.parametrize(
    ("flag", "changes"),
    [
        ("--lr ", {"lr": 0.0}),
        ("--min-lr", {"min_lr": 2.0}),
        ("--lr-decay-iters", {"lr_decay_iters": 0}),
        ("--lr-warmup-iters", {"lr_warmup_iters": 10, "lr_decay_iters": 10}),
        ("--lr-wsd-decay-iters", {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 0}),
        ("--lr-wsd-decay-iters", {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3}),
    ],
)
def test_what_is_no_curve_is_refused(flag, changes):
    config = OptimizerConfig(**{"lr": 1.0, "lr_decay_iters": 2, **changes})
    with pytest.raises(InputError, match=flag):
        build_learning_rate_scheduler(_optimizer(), config)
