"""A whole run on one rank: join the job, build, resume, train, sum up."""

from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from megatron_attnres.data.blends import parse_blend
from megatron_attnres.data.datasets import build_datasets
from megatron_attnres.data.token_ids import check_token_ids
from megatron_attnres.data.tokenizers import Tokenizer
from megatron_attnres.depth_attention.operators import choose
from megatron_attnres.errors import InputError
from megatron_attnres.optimizer.build import build_optimizer
from megatron_attnres.optimizer.configuration import DATA_TYPES
from megatron_attnres.optimizer.learning_rate import build_learning_rate_scheduler
from megatron_attnres.parallel.agreement import check_same_on_all_ranks, same_error_on_all_ranks
from megatron_attnres.parallel.cpu import device
from megatron_attnres.parallel.groups import (
    ParallelGroups,
    initialize_distributed,
    initialize_groups,
    leave_job,
)
from megatron_attnres.training.batches import BatchSource
from megatron_attnres.training.build import build_step, make_plan
from megatron_attnres.training.checkpoints.description import TrainingState
from megatron_attnres.training.checkpoints.pieces import StatePieces
from megatron_attnres.training.checkpoints.resumable import Resumable
from megatron_attnres.training.loop import TrainingLoop
from megatron_attnres.training.metrics import (
    History,
    JsonLinesFile,
    ProgressBar,
    Sinks,
    TensorBoardFile,
)
from megatron_attnres.training.profiling import open_profile
from megatron_attnres.training.run_config import RunConfig
from megatron_attnres.training.summary import report


def pretrain(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Train as configured. Called by every rank of the job.

    Raises:
        InputError: a file or value that cannot be used; the same on all ranks.
    """
    timeout = timedelta(minutes=config.timeout_minutes)
    initialize_distributed(timeout, config.backend)
    try:
        check_same_on_all_ranks(plan_description(config))
        _run(config, tokenizer, initialize_groups(config.layout, timeout))
    finally:
        leave_job()


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


def _run(config: RunConfig, tokenizer: Tokenizer, groups: ParallelGroups) -> None:
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
    optimizer = build_optimizer(step.chunks, config.optimizer, groups.collection)
    scheduler = build_learning_rate_scheduler(optimizer, config.optimizer)
    pieces = StatePieces(step.chunks, optimizer, groups)
    resumable = Resumable(
        config, plan_description(config), pieces, optimizer, scheduler, data.order_digest
    )
    state = resumable.load()

    history = History()
    with same_error_on_all_ranks():
        sinks = _sinks(config, state, history)
    profile = open_profile(config, step, groups)
    loop = TrainingLoop(config, groups, step, optimizer, scheduler, data, resumable, sinks, profile)
    try:
        loop.run(state)
    finally:
        sinks.close()
    report(config, optimizer, data, history)


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


def _sinks(config: RunConfig, state: TrainingState, history: History) -> Sinks:
    """Metrics are written by one rank."""
    if distributed.get_rank() != 0:
        return Sinks([])
    loop = config.loop
    sinks = [history]
    if loop.metrics_file is not None:
        sinks.append(JsonLinesFile(loop.metrics_file, state.iteration))
    if loop.tensorboard_dir is not None:
        sinks.append(TensorBoardFile(loop.tensorboard_dir, state.iteration))
    # Last, so that the bar is not drawn when a file cannot be opened.
    sinks.append(ProgressBar(loop.train_iters, state.iteration, loop.log_interval))
    return Sinks(sinks)
