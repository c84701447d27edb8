"""Flags that the commands for trained models share, and what they mean. No torch."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import get_args

from megatron_attnres.commands import whole_number
from megatron_attnres.data.configuration import TokenizerConfig, TokenizerType
from megatron_attnres.errors import InputError
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.launch import import_for_ranks, launch, under_launcher


@dataclass(frozen=True)
class JobFlags:
    """On which ranks a command computes, and in which data type.

    Attributes:
        layout: of the ranks.
        precision: ``fp32`` or ``bf16``; None computes in the model's own.
        backend: of torch.distributed; None picks by device.
        timeout: of the process groups.
    """

    layout: ParallelLayout
    precision: str | None
    backend: str | None
    timeout: timedelta


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Where the tokenizer lies, if not where it lay when the model was trained."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        choices=get_args(TokenizerType),
        default="SentencePieceTokenizer",
        help="of --tokenizer-model",
    )
    group.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="the model's tokenizer; not given: where the checkpoint says it was",
    )
    group.add_argument(
        "--vocab-size", type=whole_number(1), metavar="N", help="ids of a NullTokenizer"
    )


def add_job_flags(parser: argparse.ArgumentParser, pipeline: bool) -> None:
    """Ranks and data type.

    Args:
        parser: takes the flags.
        pipeline: whether the command can run pipeline stages.
    """
    group = parser.add_argument_group("ranks")
    add = group.add_argument
    size = whole_number(1)
    add(
        "--nproc-per-node",
        type=size,
        metavar="N",
        help="start this many ranks on this machine; leave it out for one rank, or under torchrun",
    )
    add("--tensor-model-parallel-size", type=size, default=1, metavar="TP", help="as in training")
    if pipeline:
        add("--pipeline-model-parallel-size", type=size, default=1, metavar="P", help="stages")
        add(
            "--virtual-pipeline-model-parallel-size",
            type=size,
            default=1,
            metavar="V",
            help="chunks per stage",
        )
    add("--sequence-parallel", action="store_true", help="shard activations over the TP ranks")
    add(
        "--precision",
        choices=["fp32", "bf16"],
        help="of parameters and activations; not given: as the model was trained",
    )
    add("--distributed-backend", choices=["gloo", "nccl"], help="not given: by device")
    add(
        "--distributed-timeout-minutes",
        type=whole_number(1),
        default=10,
        help="after which a rank that waits for a lost one gives up",
    )


def tokenizer_of(arguments: argparse.Namespace) -> TokenizerConfig | None:
    """What the tokenizer flags say; None where the checkpoint is to say it."""
    if arguments.tokenizer_model is None and arguments.vocab_size is None:
        return None
    return TokenizerConfig(
        arguments.tokenizer_type, arguments.tokenizer_model, arguments.vocab_size
    )


def job_of(arguments: argparse.Namespace) -> JobFlags:
    """What the job flags say.

    Raises:
        InputError: the ranks make no such layout.
    """
    tensor = arguments.tensor_model_parallel_size
    pipeline = getattr(arguments, "pipeline_model_parallel_size", 1)
    virtual = getattr(arguments, "virtual_pipeline_model_parallel_size", 1)
    ranks = int(os.environ["WORLD_SIZE"]) if under_launcher() else arguments.nproc_per_node or 1
    if ranks % (tensor * pipeline):
        sizes = f"--tensor-model-parallel-size {tensor}"
        if pipeline > 1:
            sizes += f" x --pipeline-model-parallel-size {pipeline}"
        raise InputError(
            f"{sizes}: needs a multiple of {tensor * pipeline} ranks, the job has {ranks}; give "
            f"--nproc-per-node {tensor * pipeline}"
        )
    return JobFlags(
        ParallelLayout(
            tensor, pipeline, virtual, ranks // (tensor * pipeline), arguments.sequence_parallel
        ),
        arguments.precision,
        arguments.distributed_backend,
        timedelta(minutes=arguments.distributed_timeout_minutes),
    )


def on_ranks(arguments: argparse.Namespace, run: Callable[[], None]) -> None:
    """Run here, or as the ranks that ``--nproc-per-node`` asks for.

    Raises:
        SystemExit: of the ranks, where they did not end with status 0.
    """
    if arguments.nproc_per_node in (None, 1) or under_launcher():
        run()
        return
    status = launch(sys.argv, arguments.nproc_per_node, prepare=import_for_ranks)
    if status:
        sys.exit(status)
