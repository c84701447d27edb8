"""A model's config.json. No torch.

A model with standard residuals is Qwen3. One that reads from depth has a model type of its own,
whose code (``modeling_attnres.py``) lies in the folder beside its configuration.
"""

from typing import Any, Literal

from megatron_attnres.model.configuration import ModelConfig

Precision = Literal["fp32", "bf16"]

CONFIG_FILE = "config.json"
QWEN3 = "qwen3"
QWEN3_ARCHITECTURE = "Qwen3ForCausalLM"
ATTNRES = "attnres"
ATTNRES_ARCHITECTURE = "AttnResForCausalLM"
# The module whose file goes into the folder.
MODELING = "modeling_attnres"
# As transformers writes them.
DTYPE_NAMES: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16"}


def architecture_of(model: ModelConfig) -> str:
    """The class that loads it."""
    return QWEN3_ARCHITECTURE if model.attn_res.mode == "baseline" else ATTNRES_ARCHITECTURE


def config_json(model: ModelConfig, precision: Precision, eos: int | None) -> dict[str, Any]:
    """The content of config.json.

    Args:
        model: sizes and residual connections.
        precision: of the folder's tensors.
        eos: the id that ends a document; None if it is not known.
    """
    dtype = DTYPE_NAMES[precision]
    return _type_of(model) | {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": model.seq_length,
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": model.tied_embeddings,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "dtype": dtype,
        # Releases before 5 know these names.
        "rope_theta": model.rotary_base,
        "torch_dtype": dtype,
    }


def generation_json(eos: int | None, pad: int | None) -> dict[str, Any]:
    """The content of generation_config.json: greedy text until a document ends.

    Args:
        eos: the id that ends a document, if it is known.
        pad: the id that fills up short rows of a batch, if there is one.
    """
    known = {"eos_token_id": eos, "pad_token_id": pad}
    return {name: value for name, value in known.items() if value is not None}


def _type_of(model: ModelConfig) -> dict[str, Any]:
    attn_res = model.attn_res
    architecture = architecture_of(model)
    if attn_res.mode == "baseline":
        return {"architectures": [architecture], "model_type": QWEN3}
    return {
        "architectures": [architecture],
        "auto_map": {
            "AutoConfig": f"{MODELING}.AttnResConfig",
            "AutoModel": f"{MODELING}.AttnResModel",
            "AutoModelForCausalLM": f"{MODELING}.{architecture}",
        },
        "model_type": ATTNRES,
        "attn_res_mode": attn_res.mode,
        "attn_res_block_size": attn_res.block_size,
        "attn_res_sources": attn_res.sources,
        "attn_res_recency_bias": attn_res.recency_bias is not None,
    }
