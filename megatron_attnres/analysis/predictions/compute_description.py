"""From flags to layers' compute times. No torch."""

import argparse

from megatron_attnres.analysis.predictions.assumptions import Assumptions
from megatron_attnres.analysis.predictions.compute_times import (
    BACKWARD_OVER_FORWARD,
    LayerTimes,
    times_from_flops,
)
from megatron_attnres.errors import InputError
from megatron_attnres.model.configuration import ModelConfig
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.checks import flag, required

FOR_FLOPS = (
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "padded_vocab_size",
)
MILLI, TERA = 1e-3, 1e12


def layer_times(
    arguments: argparse.Namespace, layout: ParallelLayout, assumptions: Assumptions
) -> LayerTimes:
    """One layer's times from --layer-forward-ms or --tflops-per-rank.

    Raises:
        InputError: neither or both, or flags that the one given has no use for or lacks.
    """
    given, rate = arguments.layer_forward_ms, arguments.tflops_per_rank
    if given is None and rate is None:
        raise InputError(
            "compute times are missing; give --layer-forward-ms, or --tflops-per-rank with "
            "--ffn-hidden-size and --num-attention-heads"
        )
    if given is not None and rate is not None:
        raise InputError(
            f"--layer-forward-ms {given:g} and --tflops-per-rank {rate:g}: give one of the two"
        )
    times = _from_times if given is not None else _from_flops
    return times(arguments, layout, assumptions)


def _from_times(
    arguments: argparse.Namespace, layout: ParallelLayout, assumptions: Assumptions
) -> LayerTimes:
    for name in FOR_FLOPS:
        if getattr(arguments, name) is not None:
            raise InputError(
                f"{flag(name)} {getattr(arguments, name)}: is for --tflops-per-rank, which "
                "--layer-forward-ms stands in for; leave it out"
            )
    recompute, backward = arguments.recompute_granularity, arguments.layer_backward_ms
    if backward is not None and recompute is not None:
        raise InputError(
            f"--recompute-granularity {recompute}: --layer-backward-ms includes recomputation; "
            "give one of the two"
        )
    if recompute == "selective":
        raise InputError(
            "--recompute-granularity selective: what core attention takes is known with "
            "--tflops-per-rank only; give --layer-backward-ms instead"
        )
    forward = assumptions.take(arguments, "layer_forward_ms", "ms")
    if backward is None:
        recompute = assumptions.take(arguments, "recompute_granularity")
        factor = BACKWARD_OVER_FORWARD + (recompute == "full")
        assumptions.note("layer_backward_over_forward", factor, origin="default")
        backward = factor * forward
        assumptions.note("layer_backward_ms", backward, "ms")
    else:
        assumptions.take(arguments, "layer_backward_ms", "ms")
    assumptions.note("output_head", "takes no time", origin="default")
    share = assumptions.take(arguments, "depth_attention_share", "of a layer's time")
    return LayerTimes(forward * MILLI, backward * MILLI, depth_attention_share=share)


def _from_flops(
    arguments: argparse.Namespace, layout: ParallelLayout, assumptions: Assumptions
) -> LayerTimes:
    if arguments.layer_backward_ms is not None:
        raise InputError(
            f"--layer-backward-ms {arguments.layer_backward_ms:g}: needs --layer-forward-ms; with "
            "--tflops-per-rank backward follows from FLOPs"
        )
    model = _model(arguments)
    _check_tensor_parallel(arguments, model, layout.tensor)
    assumptions.note(
        "num_query_groups", model.num_query_groups, "", _origin(arguments, "num_query_groups")
    )
    assumptions.note("kv_channels", model.kv_channels, "", _origin(arguments, "kv_channels"))
    rate = assumptions.take(arguments, "tflops_per_rank", "TFLOP/s")
    recompute = assumptions.take(arguments, "recompute_granularity")
    share = assumptions.take(arguments, "depth_attention_share", "of a layer's time")
    times = times_from_flops(
        model, arguments.micro_batch_size, rate * TERA * layout.tensor, recompute, share
    )
    assumptions.note("layer_forward_ms", times.forward / MILLI, "ms")
    assumptions.note("layer_backward_ms", times.backward / MILLI, "ms")
    if model.vocab_size:
        assumptions.note("head_forward_ms", times.head_forward / MILLI, "ms")
        assumptions.note("head_backward_ms", times.head_backward / MILLI, "ms")
    else:
        assumptions.note("output_head", "takes no time", origin="default")
    return times


def _model(arguments: argparse.Namespace) -> ModelConfig:
    instead = "for --tflops-per-rank, or --layer-forward-ms in its place"
    hidden = arguments.hidden_size
    ffn = required(arguments, "ffn_hidden_size", instead)
    heads = required(arguments, "num_attention_heads", instead)
    groups = arguments.num_query_groups or heads
    if heads % groups:
        raise InputError(f"--num-query-groups {groups}: must divide --num-attention-heads {heads}")
    if arguments.kv_channels is None and hidden % heads:
        raise InputError(
            f"--hidden-size {hidden}: must be divisible by --num-attention-heads {heads}; or give "
            "--kv-channels"
        )
    return ModelConfig(
        num_layers=arguments.num_layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=arguments.kv_channels or hidden // heads,
        vocab_size=arguments.padded_vocab_size or 0,
        seq_length=arguments.seq_length,
    )


def _check_tensor_parallel(arguments: argparse.Namespace, model: ModelConfig, tensor: int) -> None:
    for name, value in (
        ("num_attention_heads", model.num_attention_heads),
        ("num_query_groups", model.num_query_groups),
        ("ffn_hidden_size", model.ffn_hidden_size),
        ("padded_vocab_size", model.vocab_size),
    ):
        if value % tensor:
            raise InputError(
                f"{flag(name)} {value}: must be divisible by --tensor-model-parallel-size {tensor}"
            )


def _origin(arguments: argparse.Namespace, name: str) -> str:
    return "derived" if getattr(arguments, name) is None else "given"
