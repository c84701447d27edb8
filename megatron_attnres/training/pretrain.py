"""A whole run on one rank: join the job, build, resume, train, sum up."""

from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from megatron_attnres.data.blends import parse_blend
from megatron_attnres.data.datasets import build_datasets
from megatron_attnres.data.token_ids import check_token_ids
from megatron_attnres.data.tokenizers import Tokenizer, identity_of
from megatron_attnres.depth_attention.operators import choose
from megatron_attnres.errors import InputError, TrainingGaveUp
from megatron_attnres.optimizer.build import build_optimizer
from megatron_attnres.optimizer.configuration import DATA_TYPES
from megatron_attnres.optimizer.learning_rate import build_learning_rate_scheduler
from megatron_attnres.parallel.agreement import check_same_on_all_ranks, same_error_on_all_ranks
from megatron_attnres.parallel.cpu import accelerator_name, device
from megatron_attnres.parallel.groups import (
    ParallelGroups,
    initialize_distributed,
    initialize_groups,
    leave_job,
)
from megatron_attnres.training.batches import BatchSource
from megatron_attnres.training.build import build_step, make_plan
from megatron_attnres.training.checkpoints.pieces import StatePieces
from megatron_attnres.training.checkpoints.resumable import Resumable
from megatron_attnres.training.course import open_course
from megatron_attnres.training.iteration import Iteration
from megatron_attnres.training.loop import TrainingLoop
from megatron_attnres.training.milestones import open_events, say_end, say_start
from megatron_attnres.training.profiling import open_profile
from megatron_attnres.training.run_config import RunConfig
from megatron_attnres.training.signals import SignalNote
from megatron_attnres.training.sinks import History, open_sinks
from megatron_attnres.training.stopping import StopRequest
from megatron_attnres.training.summary import report
from megatron_attnres.training.throughput import peak_tflops
from megatron_attnres.training.watching.activity import ENDING, Activity
from megatron_attnres.training.watching.elsewhere import comes_from_elsewhere
from megatron_attnres.training.watching.start import (
    hosts_of_all_ranks,
    new_activity,
    open_watch,
)


def pretrain(config: RunConfig, tokenizer: Tokenizer, signals: SignalNote) -> int:
    """Train as configured. Called by every rank of the job.

    Args:
        config: of the run.
        tokenizer: of its data.
        signals: that ask the run to stop.

    Returns:
        The exit status: 0, or ``--exit-status-when-stopped`` of a run that was asked to stop.

    Raises:
        InputError: a file or value that cannot be used; the same on all ranks.
        TrainingGaveUp: too many updates were skipped; the same on all ranks.
    """
    initialize_distributed(timedelta(minutes=config.timeout_minutes), config.backend)
    try:
        check_same_on_all_ranks(plan_description(config))
        return _watched(config, tokenizer, signals)
    finally:
        leave_job()


def _watched(config: RunConfig, tokenizer: Tokenizer, signals: SignalNote) -> int:
    """The run, with somebody to tell if this rank or another one is lost."""
    activity = new_activity()
    watch = open_watch(config, activity)
    try:
        status = _run(config, tokenizer, signals, activity)
    except (InputError, TrainingGaveUp):
        raise
    except Exception as error:
        if watch is None:
            raise
        watch.fail(error, own_fault=not comes_from_elsewhere(error))
    finally:
        if watch is not None:
            watch.close()
    return status


def plan_description(config: RunConfig) -> dict[str, Any]:
    """All that decides who sends what to whom, and in which shape and order."""
    model = config.model
    plan = make_plan(model, config.layout, config.schedule.policy)
    return {
        **asdict(plan),
        **{f"layout {name}": value for name, value in asdict(config.layout).items()},
        **asdict(config.schedule),
        "attn_res_mode": model.attn_res.mode,
        "seq_length": model.seq_length,
        "hidden_size": model.hidden_size,
        "precision": config.optimizer.precision,
        "micro_batch_size": config.loop.micro_batch_size,
        "num_microbatches": config.num_microbatches,
        "train_iters": config.loop.train_iters,
    }


def _run(config: RunConfig, tokenizer: Tokenizer, signals: SignalNote, activity: Activity) -> int:
    groups = initialize_groups(config.layout, timedelta(minutes=config.timeout_minutes))
    with same_error_on_all_ranks():
        _check_operator(config)
    data = _open_data(config, tokenizer, groups)
    step = build_step(
        config.model,
        groups,
        config.loop.micro_batch_size,
        getattr(torch, DATA_TYPES[config.optimizer.precision]),
        config.loop.seed,
        config.schedule,
    )
    activity.waits = step.waits
    optimizer = build_optimizer(step.chunks, config.optimizer, groups.collection)
    scheduler = build_learning_rate_scheduler(optimizer, config.optimizer)
    pieces = StatePieces(step.chunks, optimizer, groups)
    resumable = Resumable(
        config,
        plan_description(config),
        pieces,
        optimizer,
        scheduler,
        data.order_digest,
        identity_of(tokenizer),
    )
    state = resumable.load()

    history, events, hosts = History(), open_events(config), hosts_of_all_ranks()
    with same_error_on_all_ranks():
        sinks = open_sinks(config, state.iteration, history)
    profile = open_profile(config, step, groups)
    stop = StopRequest(signals, config.loop.exit_duration_minutes)
    peak = peak_tflops(config.watch.peak_tflops, config.optimizer.precision, accelerator_name())
    iteration = Iteration(config, groups, step, optimizer, scheduler, data, activity, profile, peak)
    course = open_course(config, hosts, events)
    loop = TrainingLoop(
        config,
        groups,
        step,
        iteration,
        data,
        resumable,
        stop,
        sinks,
        course,
        activity,
        profile,
    )
    say_start(events, config, state.iteration, hosts)
    try:
        reason = loop.run(state)
    finally:
        sinks.close()
    with activity.doing(ENDING):
        report(config, optimizer, data, history)
        say_end(events, config, state.iteration, reason)
        # All end together: a job script may end what goes on after the first rank has ended.
        distributed.barrier()
    return config.loop.exit_status_when_stopped if reason is not None else 0


def _check_operator(config: RunConfig) -> None:
    """Refuse a forced depth-attention operator that this rank's device does not run."""
    attn_res = config.model.attn_res
    dtype = getattr(torch, DATA_TYPES[config.optimizer.precision])
    try:
        choose(attn_res.operator, device(), dtype, attn_res.recency_bias is not None)
    except ValueError as error:
        raise InputError(f"--attn-res-operator {attn_res.operator}: {error}") from error


def _open_data(config: RunConfig, tokenizer: Tokenizer, groups: ParallelGroups) -> BatchSource:
    """Check the token ids and build the datasets. Collective."""
    loop = config.loop
    check_token_ids(
        parse_blend(config.data.data_path).prefixes,
        tokenizer.vocab_size,
        distributed.get_rank(),
        distributed.get_world_size(),
    )
    validation_samples = loop.eval_iters * loop.global_batch_size if loop.eval_interval else 0
    training, validation, _ = build_datasets(
        config.data,
        tokenizer,
        config.model.seq_length,
        loop.seed,
        (loop.train_iters * loop.global_batch_size, validation_samples, 0),
    )
    return BatchSource(config, groups.data_rank, training, validation)
