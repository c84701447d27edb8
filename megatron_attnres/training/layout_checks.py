"""Sizes that do not fit each other or the layout. One line each: flag, value, what is allowed."""

from megatron_attnres.errors import InputError
from megatron_attnres.model.configuration import ModelConfig
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.run_config import RunConfig


def check_run(config: RunConfig) -> None:
    """Checks of sizes against each other and against the layout.

    Raises:
        InputError: see above.
    """
    check_model(config.model, config.layout)
    _check_batches(config)


def check_model(model: ModelConfig, layout: ParallelLayout) -> None:
    """Refuse a model that cannot be built on the layout.

    Raises:
        InputError: see above.
    """
    _check_heads(model)
    check_chunks(model.num_layers, layout)
    _check_tensor_parallel(model, layout)


def _check_heads(model: ModelConfig) -> None:
    if model.num_attention_heads % model.num_query_groups:
        raise InputError(
            f"--num-query-groups {model.num_query_groups}: must divide "
            f"--num-attention-heads {model.num_attention_heads}"
        )
    if model.kv_channels % 2:
        raise InputError(
            f"--kv-channels {model.kv_channels}: must be even for the rotary embedding"
        )


def check_chunks(num_layers: int, layout: ParallelLayout) -> None:
    """Refuse layers that do not make P x V chunks.

    Raises:
        InputError: see above.
    """
    stages, virtual, given = layout.pipeline, layout.virtual_pipeline, layout.layers_per_chunk
    if virtual > 1 and stages == 1:
        raise InputError(
            f"--virtual-pipeline-model-parallel-size {virtual}: needs "
            "--pipeline-model-parallel-size of 2 or more, which is 1"
        )
    chunks = (
        f"--pipeline-model-parallel-size {stages} x "
        f"--virtual-pipeline-model-parallel-size {virtual} = {layout.num_chunks}"
    )
    if given is None:
        if num_layers % layout.num_chunks:
            raise InputError(f"--num-layers {num_layers}: must be divisible by {chunks}")
        return
    typed = f"--pipeline-layers-per-chunk {' '.join(map(str, given))}"
    if len(given) != layout.num_chunks:
        raise InputError(f"{typed}: has {len(given)} chunks; give {chunks}")
    if sum(given) != num_layers:
        raise InputError(f"{typed}: has {sum(given)} layers in all; --num-layers is {num_layers}")
    if min(given) < 0 or 0 in given[1:-1]:
        raise InputError(
            f"{typed}: every chunk but the first (embedding) and the last (head) needs a layer"
        )


def _check_tensor_parallel(model: ModelConfig, layout: ParallelLayout) -> None:
    tensor = layout.tensor
    for name, value in (
        ("--num-attention-heads", model.num_attention_heads),
        ("--num-query-groups", model.num_query_groups),
        ("--ffn-hidden-size", model.ffn_hidden_size),
        ("--make-vocab-size-divisible-by: the padded vocabulary", model.vocab_size),
    ):
        if value % tensor:
            raise InputError(
                f"{name} {value}: must be divisible by --tensor-model-parallel-size {tensor}"
            )
    if layout.sequence_parallel:
        if tensor == 1:
            raise InputError(
                "--sequence-parallel: needs --tensor-model-parallel-size of 2 or more, which is 1"
            )
        if model.seq_length % tensor:
            raise InputError(
                f"--seq-length {model.seq_length}: must be divisible by "
                f"--tensor-model-parallel-size {tensor} under --sequence-parallel"
            )


def _check_batches(config: RunConfig) -> None:
    loop, layout = config.loop, config.layout
    per_microbatch = loop.micro_batch_size * layout.data
    if loop.global_batch_size % per_microbatch:
        raise InputError(
            f"--global-batch-size {loop.global_batch_size}: must be divisible by "
            f"--micro-batch-size {loop.micro_batch_size} x {layout.data} data-parallel ranks"
        )
    if layout.virtual_pipeline > 1:
        check_interleaving(
            layout.pipeline,
            config.num_microbatches,
            config.schedule.microbatch_group_size,
            f"--global-batch-size {loop.global_batch_size}: makes {config.num_microbatches} "
            "micro-batches",
        )


def check_interleaving(stages: int, microbatches: int, group: int, batch: str) -> None:
    """Refuse micro-batches that Megatron-Core's interleaved schedule does not take.

    Args:
        stages: P.
        microbatches: M of one pipeline.
        group: contiguous micro-batches of one virtual stage.
        batch: the flag that says how many micro-batches there are, for the error.

    Raises:
        InputError: see above.
    """
    if microbatches < stages:
        raise InputError(
            f"{batch}; the interleaved schedule needs at least {stages}, one per stage"
        )
    if not stages <= group <= microbatches:
        raise InputError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group}: must be from {stages} "
            f"(stages) to {microbatches} (micro-batches)"
        )
    if 0 < microbatches % group < stages:
        raise InputError(
            f"{batch}; in groups of {group} the last group has {microbatches % group}, which must "
            f"be 0 or at least {stages}; use a multiple of {group}"
        )
