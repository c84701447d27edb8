"""Checkpoints of small models with random weights, for tests of what reads checkpoints."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.tokenizers import identity_of, load_tokenizer
from megatron_attnres.model.configuration import ModelConfig
from megatron_attnres.training.checkpoints.description import (
    Description,
    TrainingState,
    model_identity,
)
from megatron_attnres.training.checkpoints.weights_writer import ComingTensor, write_weights


def make_checkpoint(
    folder: Path,
    model: ModelConfig,
    tokenizer: TokenizerConfig | None = None,
    precision: str = "fp32",
    seed: int = 1,
) -> Path:
    """A whole checkpoint below ``folder``; every tensor is random, norms around one."""
    tensors = {
        name: ComingTensor(shape, partial(_random, name, shape, seed))
        for name, shape in shapes_of(model).items()
    }
    identity = {} if tokenizer is None else identity_of(load_tokenizer(tokenizer))
    configuration = {
        "model": asdict(model),
        "tokenizer": None if tokenizer is None else asdict(tokenizer),
        "optimizer": {"precision": precision},
    }
    description = Description(
        TrainingState(7, 14, 28), 0, {}, model_identity(model), {}, "", identity, configuration, ""
    )
    return write_weights(folder, description, tensors)


def shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of every whole parameter, by global name."""
    h, d = model.hidden_size, model.kv_channels
    heads, groups = model.num_attention_heads, model.num_query_groups
    reader = {"query": (h,), "key_norm_weight": (h,)}
    if model.attn_res.recency_bias is not None:
        reader["recency_bias"] = (1,)
    layer = {
        "attention_norm.weight": (h,),
        "attention.linear_qkv.weight": ((heads + 2 * groups) * d, h),
        "attention.linear_proj.weight": (h, heads * d),
        "attention.q_norm.weight": (d,),
        "attention.k_norm.weight": (d,),
        "mlp_norm.weight": (h,),
        "mlp.linear_fc1.weight": (2 * model.ffn_hidden_size, h),
        "mlp.linear_fc2.weight": (h, model.ffn_hidden_size),
    }
    head = {}
    if model.attn_res.mode != "baseline":
        for owner in ("attention_reader", "mlp_reader"):
            layer |= {f"{owner}.{name}": shape for name, shape in reader.items()}
        head = {f"head_reader.{name}": shape for name, shape in reader.items()}
    shapes = {"embedding.weight": (model.vocab_size, h), "final_norm.weight": (h,), **head}
    if not model.tied_embeddings:
        shapes["output.weight"] = (model.vocab_size, h)
    for index in range(model.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _random(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + sum(map(ord, name)))
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight") or name.endswith("key_norm_weight"):
        return 1 + 0.3 * noise
    return 0.3 * noise
