"""The open reproduction ``qwen3_attnres``, as far as its logits go, and a folder of such a model.

Blocks begin as [embedding]; the running hidden state begins as the embedding and is never reset.
A sublayer reads all blocks and the running state, whose logit has a bias; at a block's start the
newest block is the running state, which is then read twice. The final norm reads the running state.
"""

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from tests.interop.models import change_config, change_tensors, make_qwen3


def make_reproduction(
    folder: Path, mode: str, num_blocks: int, dtype: torch.dtype = torch.float32, layers: int = 4
) -> Path:
    """A folder with random weights, those of readers included."""
    make_qwen3(folder, dtype, num_hidden_layers=layers)
    generator = torch.Generator().manual_seed(2)
    readers: dict[str, Tensor] = {}
    for layer in range(layers):
        for sublayer in ("attn", "mlp"):
            name = f"model.layers.{layer}.{sublayer}_res"
            query, norm, bias = (torch.randn(shape, generator=generator) for shape in (32, 32, ()))
            readers[f"{name}_proj.weight"] = (0.3 * query).unsqueeze(0).to(dtype)
            readers[f"{name}_norm.weight"] = (1 + 0.3 * norm).to(dtype)
            readers[f"{name}_bias"] = (1 + 2 * bias).to(dtype)
    change_tensors(folder, readers)
    change_config(
        folder,
        {
            "architectures": ["Qwen3AttnResForCausalLM"],
            "model_type": "qwen3_attnres",
            "attnres_mode": mode,
            "attnres_num_blocks": num_blocks,
            "attnres_gate_type": "bias",
            "attnres_recency_bias_init": 1.0,
        },
    )
    return folder


@torch.no_grad()
def reproduction_logits(
    qwen3: Qwen3ForCausalLM, tensors: dict[str, Tensor], mode: str, num_blocks: int, tokens: Tensor
) -> Tensor:
    """Of every position, [b, s, vocabulary].

    Args:
        qwen3: the modules, without readers.
        tensors: of the folder.
        mode: ``block`` or ``full``.
        num_blocks: of block mode.
        tokens: [b, s].
    """
    model = qwen3.model
    layers_per_block = math.ceil(len(model.layers) / num_blocks)
    running = model.embed_tokens(tokens)
    rotary = model.rotary_emb(running, torch.arange(tokens.shape[1]).unsqueeze(0))
    blocks = [running]

    def read(name: str, eps: float) -> Tensor:
        values = torch.stack([*blocks, running])
        keys = nn.functional.rms_norm(
            values, values.shape[-1:], tensors[f"{name}_norm.weight"], eps
        )
        logits = keys @ tensors[f"{name}_proj.weight"][0]
        logits[-1] += tensors[f"{name}_bias"]
        return (logits.softmax(0).unsqueeze(-1) * values).sum(0)

    for index, layer in enumerate(model.layers):
        eps = layer.input_layernorm.variance_epsilon
        hidden = layer.input_layernorm(read(f"model.layers.{index}.attn_res", eps))
        output, _ = layer.self_attn(
            hidden_states=hidden, position_embeddings=rotary, attention_mask=None
        )
        running = running + output
        if mode == "full":
            blocks.append(running)
        hidden = layer.post_attention_layernorm(read(f"model.layers.{index}.mlp_res", eps))
        running = running + layer.mlp(hidden)
        if mode == "full" or (index + 1) % layers_per_block == 0:
            blocks.append(running)
    return qwen3.lm_head(model.norm(running))
