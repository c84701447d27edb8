"""Small models on any layout, for tests that compare layouts with one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed

from megatron_attnres.data.batches import samples_of_step
from megatron_attnres.model.configuration import AttnResConfig, ModelConfig
from megatron_attnres.parallel.gradients import finish_gradients
from megatron_attnres.parallel.groups import ParallelGroups, initialize_groups
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.parallel.parameters import Sharding, sharding_of
from megatron_attnres.pipeline.schedule import ScheduleConfig
from megatron_attnres.pipeline.step import PipelineStep
from megatron_attnres.pipeline.timeline.records import TimelineLayout
from megatron_attnres.training.build import build_step, make_plan
from megatron_attnres.training.forward_step import forward_step
from tests.distributed import GROUP_TIMEOUT, restart_job

SEED = 1234
# Far below every gradient that is not zero by construction (the first sublayer has one source, so
# its pseudo-query has no gradient).
ZERO = 1e-13


@dataclass(frozen=True)
class Case:
    """A model on a layout with a batch; the batch is the same for every layout of equal size."""

    model: ModelConfig
    layout: ParallelLayout
    num_microbatches: int = 4
    micro_batch_size: int = 2
    recompute: str = "none"
    overlap: bool = True
    policy: str = "cached"
    early_relay: bool = True
    microbatch_group: int | None = None

    def on_one_process(self) -> "Case":
        """The same global batch on one rank, as more micro-batches."""
        return replace(
            self,
            layout=ParallelLayout(),
            num_microbatches=self.num_microbatches * self.layout.data,
            recompute="none",
            policy="cached",
            early_relay=True,
            microbatch_group=None,
        )


def small_model(
    num_layers: int = 4,
    mode: str = "block",
    block_size: int = 4,
    sources: str = "delta",
    recency_bias: float | None = None,
    tied: bool = True,
    seq_length: int = 8,
) -> ModelConfig:
    """A model of a few thousand parameters with every feature of the big ones."""
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        vocab_size=64,
        seq_length=seq_length,
        # Larger than in training, so that every parameter's gradient is far from rounding noise.
        init_method_std=0.3,
        tied_embeddings=tied,
        attn_res=AttnResConfig(mode, 1 if mode == "full" else block_size, sources, recency_bias),
    )


def benchmark_case(layers: int, hidden: int, ranks: int, virtual: int, block_size: int = 4) -> Case:
    """A model for timings, with twice as many micro-batches as stages."""
    model = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=3 * hidden,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=hidden // 4,
        vocab_size=512,
        seq_length=128,
        attn_res=AttnResConfig("block", block_size),
    )
    return Case(model, ParallelLayout(1, ranks, virtual), num_microbatches=2 * ranks)


def build(
    case: Case, dtype: torch.dtype, groups: ParallelGroups | None = None
) -> tuple[ParallelGroups, PipelineStep]:
    """Groups and step of a case, depth queries set off zero so that the weights differ."""
    groups = groups or initialize_groups(case.layout, GROUP_TIMEOUT)
    step = build_step(
        case.model,
        groups,
        case.micro_batch_size,
        dtype,
        SEED,
        ScheduleConfig(
            case.microbatch_group or case.layout.pipeline,
            case.overlap,
            case.recompute,
            case.policy,
            case.early_relay,
        ),
    )
    for chunk in step.chunks:
        for name, parameter in chunk.module.named_parameters():
            if parameter.ndim == 1:
                generator = torch.Generator().manual_seed(sum(map(ord, name)))
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data += 0.3 * noise.to(parameter.dtype)
    return groups, step


def microbatches(case: Case, data_rank: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """One rank's micro-batches; sample i of the global batch is the same on every layout."""
    generator = torch.Generator().manual_seed(seed)
    data = case.layout.data
    samples = case.num_microbatches * data * case.micro_batch_size
    text = torch.randint(
        0, case.model.vocab_size, (samples, case.model.seq_length + 1), generator=generator
    )
    batches = []
    for index in range(case.num_microbatches):
        first = (index * data + data_rank) * case.micro_batch_size
        rows = text[first : first + case.micro_batch_size]
        mask = torch.ones(rows.shape[0], case.model.seq_length)
        batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:], "loss_mask": mask})
    return batches


def run_step(
    case: Case,
    groups: ParallelGroups,
    step: PipelineStep,
    seed: int = 0,
    first_sample: int | None = None,
) -> Any:
    """Forward and backward of one batch, gradients averaged over data-parallel ranks."""
    batches = microbatches(case, groups.data_rank, seed)
    samples = ()
    if first_sample is not None:
        samples = samples_of_step(
            first_sample,
            case.micro_batch_size,
            groups.data_rank,
            case.layout.data,
            case.num_microbatches,
        )
    record = step.run(
        forward_step,
        [iter(batches) for _ in step.chunks],
        case.num_microbatches,
        samples=samples,
    )
    finish_gradients(step.chunks, groups.collection, lambda parameter: parameter.grad)
    for chunk in step.chunks:
        for parameter in chunk.parameters():
            distributed.all_reduce(parameter.grad, group=groups.collection.dp)
            parameter.grad /= case.layout.data
    return record


def full_gradients(groups: ParallelGroups, step: PipelineStep) -> dict[str, Tensor]:
    """Every parameter's whole gradient by global name, gathered to every rank of the job."""
    return _gather(groups, step, lambda parameter: parameter.grad)


def full_parameters(groups: ParallelGroups, step: PipelineStep) -> dict[str, Tensor]:
    """Every whole parameter by global name, gathered to every rank of the job."""
    return _gather(groups, step, lambda parameter: parameter.detach())


def _gather(
    groups: ParallelGroups, step: PipelineStep, tensor_of: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    own: dict[str, Tensor] = {}
    for chunk in step.chunks:
        for name, parameter in chunk.module.named_parameters():
            whole = _unsliced(tensor_of(parameter), sharding_of(parameter), groups)
            own[chunk.module.global_name(name)] = whole
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, own)
    return {name: tensor for part in everyone for name, tensor in part.items()}


def _unsliced(tensor: Tensor, sharding: Sharding | None, groups: ParallelGroups) -> Tensor:
    if sharding is None or groups.layout.tensor == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(groups.layout.tensor)]
    distributed.all_gather(parts, tensor, group=groups.collection.tp)
    by_matrix = [part.chunk(sharding.stride, dim=sharding.dim) for part in parts]
    matrices = [
        torch.cat([part[index] for part in by_matrix], dim=sharding.dim)
        for index in range(sharding.stride)
    ]
    return torch.cat(matrices, dim=sharding.dim)


def gradients_of_all(
    cases: Sequence[Case], dtype: torch.dtype = torch.float64
) -> list[dict[str, Tensor]]:
    """Gradients of one step of every case, on the ranks of the current job.

    A step's traffic is held against the plan on the way. The process groups of a layout, which take
    as long to make as a step, serve all its cases.
    """
    found = {}
    for layout in dict.fromkeys(case.layout for case in cases):
        groups = initialize_groups(layout, GROUP_TIMEOUT)
        try:
            for case in cases:
                if case.layout == layout:
                    found[case] = _gradients_of(case, groups, dtype)
        finally:
            restart_job()
    return [found[case] for case in cases]


def _gradients_of(case: Case, groups: ParallelGroups, dtype: torch.dtype) -> dict[str, Tensor]:
    groups, step = build(case, dtype, groups)
    traffic = run_step(case, groups, step).traffic
    assert traffic.bytes_sent == planned_bytes(case, groups, dtype.itemsize), case
    return full_gradients(groups, step)


def planned_bytes(case: Case, groups: ParallelGroups, itemsize: int) -> dict[Any, int]:
    """What this rank sends in one step by the plan: (direction, hop, lane) -> bytes."""
    model, layout = case.model, case.layout
    entry = entry_bytes(case, itemsize)
    sent = {}
    for hop in make_plan(model, layout, case.policy).hops:
        relayed = len(hop.relayed) if case.early_relay else 0
        for lane, entries in (("critical", hop.entries - relayed), ("relay", relayed)):
            for direction, sender in (("forward", hop.index), ("backward", hop.index + 1)):
                if entries and sender % layout.pipeline == groups.pipeline_rank:
                    sent[direction, hop.index, lane] = entries * entry * case.num_microbatches
    return sent


def timeline_layout(case: Case, dtype: torch.dtype = torch.float32) -> TimelineLayout:
    """What timelines of a case say of its layout."""
    plan = make_plan(case.model, case.layout, case.policy)
    return TimelineLayout(
        plan.layers_per_chunk,
        plan.pipeline_size,
        plan.block_size,
        plan.policy,
        case.early_relay,
        case.num_microbatches,
        case.microbatch_group or case.layout.pipeline,
        case.overlap,
        entry_bytes(case, dtype.itemsize),
    )


def entry_bytes(case: Case, itemsize: int) -> int:
    """Of one entry."""
    shards = case.layout.tensor if case.layout.sequence_parallel else 1
    tokens = case.model.seq_length // shards * case.micro_batch_size
    return tokens * case.model.hidden_size * itemsize


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over largest element; 0 for two zeros."""
    scale = wanted.abs().max().item()
    difference = (found - wanted).abs().max().item()
    return difference / scale if scale > ZERO else float(found.abs().max().item() > ZERO)
