"""From flags and files to a checked run. No torch."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_attnres.data.blends import parse_blend, parse_split
from megatron_attnres.data.configuration import DataConfig, TokenizerConfig
from megatron_attnres.data.indexed_files import check_prefix
from megatron_attnres.data.tokenizers import Tokenizer, load_tokenizer, padded_vocab_size
from megatron_attnres.errors import InputError
from megatron_attnres.model.configuration import (
    NAMED_SIZES,
    AttnResConfig,
    ModelConfig,
    NamedSize,
)
from megatron_attnres.optimizer.configuration import OptimizerConfig
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.pipeline.schedule import ScheduleConfig
from megatron_attnres.training.arguments import parse_arguments
from megatron_attnres.training.blocks import block_size_of
from megatron_attnres.training.checkpoints.configuration import SaveConfig
from megatron_attnres.training.checks import check_arguments, required
from megatron_attnres.training.launch import under_launcher
from megatron_attnres.training.layout_checks import check_run
from megatron_attnres.training.run_config import (
    LoopConfig,
    ProfileConfig,
    RunConfig,
    WatchConfig,
)
from megatron_attnres.training.watching.run_folder import RunFolder


def read_configuration(argv: Sequence[str]) -> tuple[RunConfig, Tokenizer]:
    """Flags and files to a checked run and its tokenizer.

    Raises:
        InputError: one line that names the flag or file, its value and what is allowed.
    """
    arguments = checked_arguments(argv)
    tokenizer = load_tokenizer(tokenizer_config_of(arguments))
    config = configuration_of(arguments, tokenizer.vocab_size)
    _check_data(config.data)
    return config, tokenizer


def checked_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Flags that can be, and that can be together; no file of data or tokenizer is looked at.

    Raises:
        InputError: as ``read_configuration``.
    """
    arguments = parse_arguments(argv)
    _fill_run_dir(arguments)
    check_arguments(arguments)
    return arguments


def configuration_of(arguments: argparse.Namespace, vocab_size: int) -> RunConfig:
    """Checked flags to a checked run; its data files are not looked at.

    Args:
        arguments: from ``checked_arguments``.
        vocab_size: ids of the tokenizer, before they are padded.

    Raises:
        InputError: as ``read_configuration``.
    """
    tokenizer = tokenizer_config_of(arguments)
    model = _model(arguments, padded_vocab_size(vocab_size, arguments.make_vocab_size_divisible_by))
    layout = _layout(arguments)
    config = RunConfig(
        model=model,
        layout=layout,
        schedule=ScheduleConfig(
            arguments.microbatch_group_size_per_virtual_pipeline_stage or layout.pipeline,
            arguments.overlap_p2p_communication,
            arguments.recompute_granularity,
            arguments.attn_res_pipeline,
            arguments.attn_res_early_relay,
        ),
        optimizer=_optimizer(arguments),
        tokenizer=tokenizer,
        data=DataConfig(
            tuple(required(arguments, "data_path")),
            arguments.split,
            arguments.data_cache_path,
            arguments.num_workers,
        ),
        loop=_from_arguments(LoopConfig, arguments),
        save=_save(arguments),
        profile=_profile(arguments),
        watch=_from_arguments(WatchConfig, arguments),
        nproc_per_node=arguments.nproc_per_node,
        backend=arguments.distributed_backend,
        timeout_minutes=arguments.distributed_timeout_minutes,
    )
    check_run(config)
    return config


def tokenizer_config_of(arguments: argparse.Namespace) -> TokenizerConfig:
    """Which tokenizer the flags name.

    Raises:
        InputError: the flag that its type needs is missing.
    """
    needed = "vocab_size" if arguments.tokenizer_type == "NullTokenizer" else "tokenizer_model"
    required(arguments, needed)
    return _from_arguments(TokenizerConfig, arguments)


def _fill_run_dir(arguments: argparse.Namespace) -> None:
    """``--run-dir`` has a place for every output that no flag of its own places."""
    if not arguments.run_dir:
        return
    folder = RunFolder(Path(arguments.run_dir))
    for name, path in (
        ("metrics_file", folder.metrics),
        ("tensorboard_dir", folder.tensorboard),
        ("save", folder.checkpoints),
    ):
        if getattr(arguments, name) is None:
            setattr(arguments, name, str(path))


def _check_data(data: DataConfig) -> None:
    """Shares and files, looked at before torch takes its seconds to load."""
    parse_split(data.split)
    for prefix in parse_blend(data.data_path).prefixes:
        check_prefix(prefix)


def _from_arguments(kind: type, arguments: argparse.Namespace, **given: Any) -> Any:
    """A dataclass whose fields carry the flags' names."""
    values = {
        field.name: getattr(arguments, field.name)
        for field in fields(kind)
        if field.name not in given
    }
    return kind(**values, **given)


def _save(arguments: argparse.Namespace) -> SaveConfig | None:
    if arguments.save is None:
        return None
    return SaveConfig(
        arguments.save,
        arguments.async_save,
        arguments.save_retries,
        arguments.keep_last,
        arguments.keep_every,
    )


def _profile(arguments: argparse.Namespace) -> ProfileConfig | None:
    """The iterations FROM:TO; ``check_arguments`` has seen that they are two numbers."""
    if arguments.profile_pipeline is None:
        return None
    first, last = map(int, arguments.profile_pipeline.split(":"))
    return ProfileConfig(first, last, arguments.profile_pipeline_dir)


def _model(arguments: argparse.Namespace, vocab_size: int) -> ModelConfig:
    sizes = _sizes(arguments)
    return ModelConfig(
        **sizes,
        vocab_size=vocab_size,
        seq_length=arguments.seq_length,
        norm_epsilon=arguments.norm_epsilon,
        init_method_std=arguments.init_method_std,
        hidden_dropout=arguments.hidden_dropout,
        tied_embeddings=not arguments.untie_embeddings_and_output_weights,
        attn_res=AttnResConfig(
            arguments.attn_res_mode,
            block_size_of(arguments, 2 * sizes["num_layers"]),
            arguments.attn_res_sources,
            arguments.attn_res_recency_bias,
            arguments.attn_res_operator,
        ),
    )


def _sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    """The named size with single flags over it, or the flags alone."""
    given = {field.name: getattr(arguments, field.name) for field in fields(NamedSize)}
    if arguments.model_size is not None:
        named = vars(NAMED_SIZES[arguments.model_size])
        return {name: named[name] if value is None else value for name, value in given.items()}
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"):
        required(arguments, name, "or --model-size")
    heads = given["num_attention_heads"]
    given["num_query_groups"] = given["num_query_groups"] or heads
    if given["kv_channels"] is None:
        if given["hidden_size"] % heads:
            raise InputError(
                f"--hidden-size {given['hidden_size']}: must be divisible by "
                f"--num-attention-heads {heads}; or give --kv-channels"
            )
        given["kv_channels"] = given["hidden_size"] // heads
    given["rotary_base"] = given["rotary_base"] or 10_000.0
    return given


def _layout(arguments: argparse.Namespace) -> ParallelLayout:
    """The layout that the job's ranks make.

    Raises:
        InputError: TP x P does not divide the number of ranks.
    """
    tensor, pipeline = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    # Under a launcher a job may span nodes, whatever --nproc-per-node says.
    world_size = (
        int(os.environ["WORLD_SIZE"]) if under_launcher() else arguments.nproc_per_node or 1
    )
    model_ranks = tensor * pipeline
    if world_size % model_ranks:
        raise InputError(
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} "
            f"needs a multiple of {model_ranks} ranks, the job has {world_size}; start it with "
            f"--nproc-per-node {model_ranks} or under torchrun"
        )
    return ParallelLayout(
        tensor,
        pipeline,
        arguments.virtual_pipeline_model_parallel_size,
        world_size // model_ranks,
        arguments.sequence_parallel,
        tuple(arguments.pipeline_layers_per_chunk) if arguments.pipeline_layers_per_chunk else None,
    )


def _optimizer(arguments: argparse.Namespace) -> OptimizerConfig:
    return _from_arguments(
        OptimizerConfig,
        arguments,
        lr_decay_iters=arguments.lr_decay_iters or arguments.train_iters,
        lr_wsd_decay_iters=arguments.lr_wsd_decay_iters or 0,
    )
