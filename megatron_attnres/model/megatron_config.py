"""The configuration object that Megatron-Core's layers and schedules take."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_attnres.model.configuration import ModelConfig
from megatron_attnres.parallel.layout import ParallelLayout


def megatron_config(
    model: ModelConfig,
    layout: ParallelLayout,
    dtype: torch.dtype,
    microbatch_group_size: int,
    overlap_p2p: bool,
) -> TransformerConfig:
    """Translate our configurations into Megatron-Core's.

    Args:
        model: sizes.
        layout: parallel sizes.
        dtype: data type of parameters, activations and pipeline transfers.
        microbatch_group_size: contiguous micro-batches of one virtual stage.
        overlap_p2p: let the interleaved schedule post receives ahead of compute.
            Plain 1F1B has no such variant.
    """
    interleaved = layout.virtual_pipeline > 1
    overlap = interleaved and overlap_p2p
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        layernorm_epsilon=model.norm_epsilon,
        add_bias_linear=False,
        gated_linear_unit=True,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if interleaved else None,
        microbatch_group_size_per_vp_stage=microbatch_group_size,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Parameters are filled by name afterwards (parallel/parameters.py).
        use_cpu_initialization=True,
        perform_initialization=False,
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
        # A sent output is needed only as an autograd node; its storage is the transfer's.
        deallocate_pipeline_outputs=True,
        # Fusions that need CUDA extensions of Megatron-Core; ours do not go through them.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
