"""What flags may not be together. Each check ends in one line: flag, value, what is allowed."""

import argparse
import importlib.util
import math
from pathlib import Path
from typing import Any

from megatron_attnres.errors import (
    EXIT_STATUS_BAD_INPUT,
    EXIT_STATUS_FAILED,
    EXIT_STATUS_GAVE_UP,
    InputError,
)
from megatron_attnres.output_files import check_output_file, check_output_folder

POSITIVE = [
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "seq_length",
    "rotary_base",
    "norm_epsilon",
    "init_method_std",
    "make_vocab_size_divisible_by",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "vocab_size",
    "train_iters",
    "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage",
    "nproc_per_node",
    "distributed_timeout_minutes",
    "micro_batch_size",
    "global_batch_size",
    "lr",
    "adam_eps",
    "eval_interval",
    "eval_iters",
    "log_interval",
    "save_interval",
    "keep_last",
    "keep_every",
    "exit_duration_minutes",
    "lr_decay_iters",
    "lr_wsd_decay_iters",
    "heartbeat_seconds",
    "alarm_window",
    "peak_tflops",
]
NOT_NEGATIVE = [
    "min_lr",
    "lr_warmup_iters",
    "weight_decay",
    "clip_grad",
    "num_workers",
    "seed",
    "save_retries",
    "max_skipped_steps",
    "loss_spike_deviations",
    "grad_norm_alarm_ratio",
    "straggler_interval",
]
EXIT_STATUSES = (EXIT_STATUS_FAILED, EXIT_STATUS_BAD_INPUT, EXIT_STATUS_GAVE_UP)
# Of two iterations; Python refuses to read numbers of thousands of digits.
MOST_CHARACTERS = 40
# Checkpoints hold float32.
LARGEST_PARAMETER = 3.4e38
OUTPUT_FILES = ["metrics_file", "summary_file"]
# The run's folder first: outputs that no flag places elsewhere lie in it.
OUTPUT_FOLDERS = ["run_dir", "save", "tensorboard_dir", "data_cache_path", "profile_pipeline_dir"]


def flag(name: str) -> str:
    """A key as it is typed."""
    return "--" + name.replace("_", "-")


def required(arguments: argparse.Namespace, name: str, instead: str = "") -> Any:
    """The flag's value.

    Raises:
        InputError: it was not given.
    """
    value = getattr(arguments, name)
    if value is None:
        raise InputError(f"{flag(name)} is missing; give it{' ' + instead if instead else ''}")
    return value


def check_arguments(arguments: argparse.Namespace) -> None:
    """Checks that need no file and no other part of the run.

    Raises:
        InputError: see above.
    """
    for name in POSITIVE:
        value = getattr(arguments, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f"{flag(name)} {value}: must be above 0")
    for name in NOT_NEGATIVE:
        value = getattr(arguments, name)
        if not (value >= 0 and math.isfinite(value)):
            raise InputError(f"{flag(name)} {value}: must be 0 or more")
    for name in ("adam_beta1", "adam_beta2", "hidden_dropout"):
        value = getattr(arguments, name)
        if not 0 <= value < 1:
            raise InputError(f"{flag(name)} {value}: must be at least 0 and below 1")
    required(arguments, "train_iters")
    required(arguments, "global_batch_size")
    _check_attention_residual_flags(arguments)
    _check_schedule_of_learning_rate(arguments)
    if arguments.zero_cpu_offload and arguments.zero_stage == 0:
        raise InputError("--zero-cpu-offload: needs --zero-stage 1, which is 0")
    if arguments.summary_file is not None and arguments.metrics_file is None:
        raise InputError(
            f"--summary-file {arguments.summary_file}: sums up --metrics-file, which is missing"
        )
    if arguments.save_interval is not None and arguments.save is None:
        raise InputError(f"--save-interval {arguments.save_interval}: needs --save DIR")
    _check_checkpoints(arguments)
    _check_profile(arguments)
    _check_watching(arguments)
    _check_outputs(arguments)


def _check_checkpoints(arguments: argparse.Namespace) -> None:
    load, save = arguments.load, arguments.save
    for name in ("keep_last", "keep_every"):
        value = getattr(arguments, name)
        if value is not None and save is None:
            raise InputError(f"{flag(name)} {value}: needs --save DIR")
    if arguments.keep_every is not None and arguments.keep_last is None:
        raise InputError(f"--keep-every {arguments.keep_every}: needs --keep-last K")
    if arguments.save_on_signal and save is None:
        raise InputError("--save-on-signal: needs --save DIR")
    if arguments.load_weights_only and load is None:
        raise InputError("--load-weights-only: needs --load DIR")
    if load in ("latest", "auto"):
        if save is None:
            raise InputError(f"--load {load}: needs --save DIR, where it looks")
    elif load is not None and not Path(load).is_dir():
        raise InputError(f"--load {load}: no such folder; give a folder made by --save")


def _check_profile(arguments: argparse.Namespace) -> None:
    window, folder = arguments.profile_pipeline, arguments.profile_pipeline_dir
    if window is None:
        if folder is not None:
            raise InputError(f"--profile-pipeline-dir {folder}: needs --profile-pipeline FROM:TO")
        return
    if not folder:
        raise InputError(f"--profile-pipeline {window}: needs --profile-pipeline-dir DIR")
    first, colon, last = window.partition(":")
    numbers = colon and first.isdecimal() and last.isdecimal() and len(window) < MOST_CHARACTERS
    if not numbers or not 1 <= int(first) <= int(last) <= arguments.train_iters:
        raise InputError(
            f"--profile-pipeline {window[:MOST_CHARACTERS]}: must be two iterations FROM:TO from 1 "
            f"to --train-iters {arguments.train_iters}, the first not after the last"
        )
    if arguments.pipeline_model_parallel_size == 1:
        raise InputError(
            f"--profile-pipeline {window}: --pipeline-model-parallel-size 1 has no hops to profile"
        )


def _check_watching(arguments: argparse.Namespace) -> None:
    status, ratio = arguments.exit_status_when_stopped, arguments.straggler_ratio
    if not 0 <= status <= 255 or status in EXIT_STATUSES:
        raise InputError(
            f"--exit-status-when-stopped {status}: must be 0 or from 4 to 255; the others say that "
            "a run failed"
        )
    if not (ratio >= 1 and math.isfinite(ratio)):
        raise InputError(f"--straggler-ratio {ratio}: must be 1 or more")
    if arguments.run_dir == "":
        raise InputError("--run-dir: is empty; give a folder")
    project = arguments.wandb_project
    if project is None:
        return
    if arguments.run_dir is None:
        raise InputError(f"--wandb-project {project}: needs --run-dir DIR, where it writes")
    package = importlib.util.find_spec("wandb")
    # A folder of that name, as the package itself leaves behind, is found as well.
    if package is None or package.origin is None:
        raise InputError(
            f"--wandb-project {project}: needs the package wandb, which is not installed; "
            "pip install wandb"
        )


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse at once what would else fail after hours of training. Makes nothing."""
    for name in OUTPUT_FOLDERS:
        path = getattr(arguments, name)
        if path is not None:
            check_output_folder(flag(name), path, Path(path))
    for name in OUTPUT_FILES:
        path = getattr(arguments, name)
        check_output_file(flag(name), path)


def _check_attention_residual_flags(arguments: argparse.Namespace) -> None:
    mode = arguments.attn_res_mode
    bias = arguments.attn_res_recency_bias
    if bias is not None and not abs(bias) <= LARGEST_PARAMETER:
        raise InputError(
            f"--attn-res-recency-bias {bias}: must be a finite number, within what float32 holds"
        )
    if mode == "baseline" and bias is not None:
        raise InputError(
            f"--attn-res-recency-bias {bias}: "
            "--attn-res-mode baseline has no depth attention to bias; use block or full"
        )
    if mode == "baseline" and arguments.attn_res_sources == "cumulative":
        raise InputError(
            "--attn-res-sources cumulative: --attn-res-mode baseline has no sources; "
            "use block or full"
        )
    if mode == "baseline" and arguments.attn_res_operator != "auto":
        raise InputError(
            f"--attn-res-operator {arguments.attn_res_operator}: --attn-res-mode baseline has no "
            "depth attention; use block or full"
        )


def _check_schedule_of_learning_rate(arguments: argparse.Namespace) -> None:
    warmup = arguments.lr_warmup_iters
    end = arguments.lr_decay_iters or arguments.train_iters
    if warmup >= end:
        raise InputError(
            f"--lr-warmup-iters {warmup}: must be below --lr-decay-iters "
            f"(--train-iters if not given), which is {end}"
        )
    if arguments.min_lr > arguments.lr:
        raise InputError(f"--min-lr {arguments.min_lr}: must be at most --lr {arguments.lr}")
    decay = arguments.lr_wsd_decay_iters
    if arguments.lr_decay_style == "WSD":
        if decay is None:
            raise InputError("--lr-decay-style WSD: needs --lr-wsd-decay-iters")
        if decay + warmup > end:
            raise InputError(
                f"--lr-wsd-decay-iters {decay}: with --lr-warmup-iters {warmup} it must fit into "
                f"{end} iterations"
            )
    elif decay is not None:
        raise InputError(f"--lr-wsd-decay-iters {decay}: needs --lr-decay-style WSD")
