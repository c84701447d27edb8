"""The learning rate over the iterations: Megatron-Core's scheduler from our configuration."""

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_attnres.errors import InputError
from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.optimizer.training_optimizer import TrainingOptimizer


def build_learning_rate_scheduler(
    optimizer: TrainingOptimizer, config: OptimizerConfig
) -> OptimizerParamScheduler:
    """Warm-up from 0, then constant, linear, cosine or warmup-stable-decay (WSD).

    The scheduler sets `lr` and `weight_decay` of the optimizer's groups when it is built and
    at each `step(1)`, to be called after the optimizer's own step. As in Megatron, iteration
    k (from 1) therefore runs at the curve's point k - 1. `state_dict` and `load_state_dict`
    carry the number of steps; the curve itself stays the configuration's, so that a resumed run
    may be made longer.

    Raises:
        InputError: the iterations or rates do not form a curve.
    """
    check_learning_rate_flags(config)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_iters,
        lr_decay_steps=config.lr_decay_iters,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=config.lr_decay_iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=config.lr_wsd_decay_iters,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )


def current_learning_rate(optimizer: TrainingOptimizer) -> float:
    """The rate that the next optimizer step will use; all groups have the same."""
    return optimizer.param_groups[0]["lr"]


def check_learning_rate_flags(config: OptimizerConfig) -> None:
    """Refuse rates and iterations that form no curve.

    Raises:
        InputError: names the flag, its value and what is allowed.
    """
    warmup, decay, wsd = config.lr_warmup_iters, config.lr_decay_iters, config.lr_wsd_decay_iters
    if not config.lr > 0:
        raise InputError(f"--lr {config.lr}: must be above 0")
    if not 0 <= config.min_lr <= config.lr:
        raise InputError(f"--min-lr {config.min_lr}: must be from 0 to --lr ({config.lr})")
    if decay < 1:
        raise InputError(f"--lr-decay-iters {decay}: must be at least 1")
    if not 0 <= warmup < decay:
        raise InputError(f"--lr-warmup-iters {warmup}: must be from 0 to {decay - 1}")
    if config.lr_decay_style == "WSD" and not 1 <= wsd <= decay - warmup:
        raise InputError(f"--lr-wsd-decay-iters {wsd}: must be from 1 to {decay - warmup}")
