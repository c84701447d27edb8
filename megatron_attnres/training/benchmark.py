"""A layer, a training step and a decode step on one rank, to time against each other."""

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron_attnres.depth_attention.benchmark import (
    fla_reference,
    median_ratio,
    pseudo_code,
    time_in_turn,
)
from megatron_attnres.depth_attention.module import DepthAttention
from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.model.configuration import NAMED_SIZES, AttnResConfig, ModelConfig
from megatron_attnres.model.inference import Decoder
from megatron_attnres.model.layer import TransformerLayer
from megatron_attnres.model.megatron_config import megatron_config
from megatron_attnres.model.rotary import rotary_tables
from megatron_attnres.optimizer.build import build_optimizer
from megatron_attnres.optimizer.configuration import DATA_TYPES, OptimizerConfig, Precision
from megatron_attnres.optimizer.main_gradients import main_gradient
from megatron_attnres.parallel.cpu import device
from megatron_attnres.parallel.gradients import finish_gradients
from megatron_attnres.parallel.groups import (
    ParallelGroups,
    initialize_distributed,
    initialize_groups,
)
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.pipeline.schedule import Recompute, ScheduleConfig
from megatron_attnres.pipeline.step import PipelineStep
from megatron_attnres.training.build import build_step
from megatron_attnres.training.forward_step import forward_step

HEAD_WIDTH = 64
SEED = 1


def single_rank_groups() -> ParallelGroups:
    """Make this process a job of one rank."""
    timeout = timedelta(minutes=1)
    initialize_distributed(timeout, None)
    return initialize_groups(ParallelLayout(), timeout)


def baseline_layer(
    hidden: int, tokens: int, dtype: torch.dtype, groups: ParallelGroups
) -> Callable[[], None]:
    """Forward and backward of one layer with standard residuals.

    Args:
        hidden: h, a multiple of 64; heads are 64 wide, two share a key head, the MLP is 3 h wide.
        tokens: of one sequence.
        dtype: of parameters and activations.
        groups: of one rank.
    """
    heads = hidden // HEAD_WIDTH
    model = ModelConfig(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=3 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads // 2 if heads % 2 == 0 else heads,
        kv_channels=HEAD_WIDTH,
        vocab_size=128,
        seq_length=tokens,
        attn_res=AttnResConfig("baseline"),
    )
    config = megatron_config(model, groups.layout, dtype, 1, overlap_p2p=False)
    layer = TransformerLayer(
        config, model.attn_res, groups.collection, 0, (False, False), recompute_core_attention=False
    ).to(device())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=model.init_method_std)
    rotary = rotary_tables(tokens, HEAD_WIDTH, model.rotary_base, dtype, device())
    stream = torch.randn(tokens, 1, hidden, dtype=dtype, device=device(), requires_grad=True)
    blocks = (((layer.attention_reader,),), ((layer.mlp_reader,),))

    def run() -> None:
        output = layer(DepthState((), stream), rotary, blocks).partial
        torch.autograd.grad(output, [stream, *layer.parameters()], torch.ones_like(output))

    return run


def compared_models(
    size: str, num_blocks: int, vocab_size: int, tokens: int
) -> dict[str, ModelConfig]:
    """A named size with standard residuals and with blocks of (at most) equal length."""
    named = NAMED_SIZES[size]
    block_size = -(-2 * named.num_layers // num_blocks)
    baseline = ModelConfig(
        **asdict(named),
        vocab_size=vocab_size,
        seq_length=tokens,
        attn_res=AttnResConfig("baseline"),
    )
    ours = replace(baseline, attn_res=AttnResConfig("block", block_size))
    return {"baseline": baseline, "ours": ours}


def benchmark_training_step(
    models: dict[str, ModelConfig], precision: Precision, rounds: int, groups: ParallelGroups
) -> dict[str, Any]:
    """Whole training steps (forward, backward, update) of one sequence, in turn, in ms.

    Args:
        models: ``baseline`` and ``ours``; ours is timed with the paper's pseudo-code in place of
            its reads as well, and with fla-core's plain operator where that is installed.
        precision: of parameters and activations.
        rounds: timed rounds.
        groups: of one rank.
    """
    steps = {name: TrainingStep(model, precision, groups) for name, model in models.items()}
    for name, read in (("naive", pseudo_code), ("fla_naive", fla_reference())):
        if read is not None:
            steps[name] = TrainingStep(models["ours"], precision, groups)
            steps[name].read_with(read)
    times = time_in_turn({name: step.run for name, step in steps.items()}, rounds, device())
    return {
        **{f"{name}_ms": median(values) for name, values in times.items()},
        "rounds": rounds,
        "ratio": median_ratio(times["ours"], times["baseline"]),
        "naive_ratio": median_ratio(times["naive"], times["baseline"]),
    }


def benchmark_peak_memory(
    models: dict[str, ModelConfig], precision: Precision, threads: int
) -> dict[str, Any]:
    """Peak memory of training steps with full recomputation, each model in a fresh process."""
    peaks = {}
    for name, model in models.items():
        with get_context("spawn").Pool(1) as pool:
            peaks[name] = pool.apply(_peak_memory_of_steps, (model, precision, threads))
    return {
        **{f"{name}_bytes": peak for name, peak in peaks.items()},
        "ratio": peaks["ours"] / peaks["baseline"],
    }


def benchmark_decode_step(
    models: dict[str, ModelConfig],
    precision: Precision,
    context: int,
    rounds: int,
    groups: ParallelGroups,
) -> dict[str, Any]:
    """One token after a context, batch 1, key/value cache filled, in turn, in ms.

    Args:
        models: ``baseline`` and ``ours``.
        precision: of parameters and activations.
        context: tokens in the cache.
        rounds: timed rounds, of several steps each.
        groups: of one rank.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=device())
    forms = {}
    for name, model in models.items():
        step = _step(replace(model, seq_length=context + 1), precision, "none", groups)
        decoder = Decoder(step.chunks[0].module, batch_size=1, max_length=context + 1)
        decoder.next_logits(torch.zeros(1, context, dtype=torch.long, device=device()))
        forms[name] = _decode(decoder, token, context)
    times = time_in_turn(forms, rounds, device())
    return {
        **{f"{name}_ms": median(values) for name, values in times.items()},
        "context": context,
        "rounds": rounds,
        "ratio": median_ratio(times["ours"], times["baseline"]),
    }


def _decode(decoder: Decoder, token: torch.Tensor, context: int) -> Callable[[], None]:
    def run() -> None:
        decoder.next_logits(token)
        decoder.cache.length = context

    return run


class TrainingStep:
    """A model of one rank, its optimizer and one sequence of random tokens."""

    def __init__(
        self,
        model: ModelConfig,
        precision: Precision,
        groups: ParallelGroups,
        recompute: Recompute = "none",
    ) -> None:
        self._groups = groups
        self.step = _step(model, precision, recompute, groups)
        self.optimizer = build_optimizer(
            self.step.chunks,
            OptimizerConfig(precision=precision, zero_stage=0),
            groups.collection,
        )
        text = torch.randint(0, model.vocab_size, (1, model.seq_length + 1))
        self._batch = {
            "tokens": text[:, :-1].to(device()),
            "labels": text[:, 1:].to(device()),
            "loss_mask": torch.ones(1, model.seq_length, device=device()),
        }

    def run(self) -> None:
        """Forward, backward, update."""
        self.step.run(forward_step, [iter([self._batch])], 1)
        finish_gradients(self.step.chunks, self._groups.collection, main_gradient)
        self.optimizer.step()

    def read_with(self, read: Callable[..., torch.Tensor]) -> None:
        """Let every reader read on its own, with another operator."""
        for module in self.step.chunks[0].modules():
            if isinstance(module, DepthAttention):
                module.look_ahead = lambda state, block: state
                module.forward = lambda state, module=module: read(
                    state.readable(), module.query, module.key_norm_weight
                )


def _step(
    model: ModelConfig, precision: Precision, recompute: Recompute, groups: ParallelGroups
) -> PipelineStep:
    data_type = getattr(torch, DATA_TYPES[precision])
    schedule = ScheduleConfig(1, overlap_p2p=False, recompute=recompute)
    return build_step(model, groups, 1, data_type, SEED, schedule)


def _peak_memory_of_steps(model: ModelConfig, precision: Precision, threads: int) -> int:
    """Bytes that this process grew by, or the device's peak. Called in a fresh process."""
    torch.set_num_threads(threads)
    groups = single_rank_groups()
    before = _resident_peak()
    step = TrainingStep(model, precision, groups, recompute="full")
    for _ in range(3):
        step.run()
    if device().type == "cuda":
        return torch.cuda.max_memory_allocated()
    return _resident_peak() - before


def _resident_peak() -> int:
    """Of this process alone: getrusage's figure begins with that of the process that started it."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1))
