"""What a Hugging Face folder holds, as plain data; what cannot be ours is refused. No torch."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_attnres.errors import InputError
from megatron_attnres.interop.folders import reading
from megatron_attnres.interop.hf_config import (
    ATTNRES,
    ATTNRES_ARCHITECTURE,
    CONFIG_FILE,
    DTYPE_NAMES,
    QWEN3,
    QWEN3_ARCHITECTURE,
    Precision,
)
from megatron_attnres.model.configuration import AttnResConfig, ModelConfig

QWEN3_ATTNRES = "qwen3_attnres"
_ARCHITECTURES = {
    QWEN3: QWEN3_ARCHITECTURE,
    ATTNRES: ATTNRES_ARCHITECTURE,
    QWEN3_ATTNRES: "Qwen3AttnResForCausalLM",
}

# What a field may say besides nothing at all.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "hidden_act": ("silu",),
    "is_causal": (True,),
    "mlp_bias": (False,),
    "num_experts": (0,),
    "partial_rotary_factor": (1,),
    "per_layer_config": ({},),
    "quantization_config": (),
}
_GATE = "attnres_gate_type"
_OF_QWEN3_ATTNRES = {
    "attnres_mode",
    "attnres_num_blocks",
    "attnres_recency_bias_init",
    _GATE,
}
_OF_ATTNRES = {
    "attn_res_mode",
    "attn_res_block_size",
    "attn_res_sources",
    "attn_res_recency_bias",
}
# What transformers takes where a configuration says nothing.
_DEFAULT_ROTARY_BASE = 10_000.0
_DEFAULT_NORM_EPSILON = 1e-6
_DEFAULT_INITIAL_STD = 0.02
_DEFAULT_WINDOW_LAYERS = 28
# Beyond any model; what is larger would fill the memory before it is held against the tensors.
_MOST_LAYERS, _LARGEST_SIZE = 10_000, 10**9


@dataclass(frozen=True)
class HuggingFaceModel:
    """A folder's model.

    Attributes:
        given: the folder as typed, for errors.
        folder: of the model.
        model_type: ``qwen3``, ``attnres`` (made by our export) or ``qwen3_attnres`` (of an open
            reproduction).
        architecture: the class that loads it.
        model: sizes and residual connections.
        precision: of its tensors; None if config.json does not say.
    """

    given: str
    folder: Path
    model_type: str
    architecture: str
    model: ModelConfig
    precision: Precision | None

    @property
    def has_head_reader(self) -> bool:
        """Whether its output head reads from depth."""
        return self.model_type == ATTNRES

    @property
    def reads_newest_twice(self) -> bool:
        """Whether a block's first sublayer reads the newest source twice, once with the bias."""
        return self.model_type == QWEN3_ATTNRES


def find_source(given: str) -> HuggingFaceModel:
    """The model of a folder, by its config.json.

    Raises:
        InputError: there is none, or it has what our model has not; names field and value.
    """
    folder = Path(given)
    with reading(given):
        config = _read(folder)
        model_type, architecture = _checked_type(config)
        _check_features(config)
        model = _model(config, model_type)
        return HuggingFaceModel(given, folder, model_type, architecture, model, _precision(config))


def _read(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise InputError("no such folder; give that of a Hugging Face model, downloaded before")
    if not path.is_file():
        raise InputError(f"holds no {CONFIG_FILE}; give the folder of a Hugging Face model")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{CONFIG_FILE} cannot be read ({reason})") from None
    if not isinstance(config, dict):
        raise InputError(f"{CONFIG_FILE} holds a {type(config).__name__}; fields are allowed")
    return config


def _checked_type(config: dict[str, Any]) -> tuple[str, str]:
    """Model type and architecture."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        raise _refusal("model_type", model_type, f"allowed are {', '.join(_ARCHITECTURES)}")
    expected = _ARCHITECTURES[model_type]
    architectures = config.get("architectures") or [expected]
    one = architectures[0] if isinstance(architectures, list) else architectures
    if one != expected:
        raise _refusal("architectures", architectures, f"allowed is {expected}")
    return model_type, one


def _check_features(config: dict[str, Any]) -> None:
    for field, supported in _SUPPORTED.items():
        value = config.get(field)
        if value is not None and value not in supported:
            allowed = f"allowed is {json.dumps(supported[0])}" if supported else "none is supported"
            raise _refusal(field, value, allowed)
    _check_layer_types(config)


def _check_layer_types(config: dict[str, Any]) -> None:
    """Refuse sliding windows, which transformers finds in one of two ways for Qwen3."""
    named = config.get("layer_types")
    if named:
        if isinstance(named, list) and "sliding_attention" in named:
            raise _refusal("layer_types", named, "sliding windows are not supported")
        if not isinstance(named, list) or any(one != "full_attention" for one in named):
            raise _refusal("layer_types", named, "allowed is full_attention")
    elif config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None:
        first = _number(config, "max_window_layers", _DEFAULT_WINDOW_LAYERS)
        if first < _size(config, "num_hidden_layers", _MOST_LAYERS):
            raise _refusal(
                "use_sliding_window",
                config["use_sliding_window"],
                "sliding windows are not supported",
            )


def _model(config: dict[str, Any], model_type: str) -> ModelConfig:
    num_layers = _size(config, "num_hidden_layers", _MOST_LAYERS)
    heads, groups = _size(config, "num_attention_heads"), _size(config, "num_key_value_heads")
    if heads % groups:
        raise _refusal("num_key_value_heads", groups, f"a divisor of {heads} heads is needed")
    if _size(config, "head_dim") % 2:
        raise _refusal("head_dim", config["head_dim"], "an even number is needed")
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=_size(config, "hidden_size"),
        ffn_hidden_size=_size(config, "intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=config["head_dim"],
        vocab_size=_size(config, "vocab_size"),
        seq_length=_size(config, "max_position_embeddings"),
        norm_epsilon=_above_zero(config, "rms_norm_eps", _DEFAULT_NORM_EPSILON),
        rotary_base=_rotary_base(config),
        init_method_std=_above_zero(config, "initializer_range", _DEFAULT_INITIAL_STD),
        tied_embeddings=_switch(config, "tie_word_embeddings", False),
        attn_res=_attn_res(config, model_type, num_layers),
    )


def _rotary_base(config: dict[str, Any]) -> float:
    """From where releases of transformers have put it since; other kinds of rotary are refused."""
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(field) or {}
    if isinstance(rope, dict) and isinstance(rope.get("full_attention"), dict):
        rope = rope["full_attention"]
    if not isinstance(rope, dict):
        raise _refusal(field, rope, "allowed is rope_type default")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise _refusal(field, rope, "allowed is rope_type default")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise _refusal(field, rope, "allowed is partial_rotary_factor 1")
    outside = _above_zero(config, "rope_theta", _DEFAULT_ROTARY_BASE)
    return _above_zero(rope, "rope_theta", outside)


def _attn_res(config: dict[str, Any], model_type: str, num_layers: int) -> AttnResConfig:
    if model_type == QWEN3:
        return AttnResConfig("baseline")
    of_attnres = model_type == ATTNRES
    prefix, known = ("attn_res_", _OF_ATTNRES) if of_attnres else ("attnres_", _OF_QWEN3_ATTNRES)
    for field in sorted(config):
        if field.startswith(prefix) and field not in known:
            raise _refusal(field, config[field], f"known are {', '.join(sorted(known))}")
    mode = _one_of(config, f"{prefix}mode", ("block", "full"))
    if of_attnres:
        size = _size(config, "attn_res_block_size")
        if mode == "full" and size != 1:
            raise _refusal("attn_res_block_size", size, "allowed in full mode is 1")
        sources = _one_of(config, "attn_res_sources", ("delta", "cumulative"))
        # The scalar's start is not kept; what it has become is a tensor.
        bias = 0.0 if _switch(config, "attn_res_recency_bias", False) else None
        return AttnResConfig(mode, size, sources, bias)
    _one_of(config, _GATE, ("bias",))
    layers_per_block = math.ceil(num_layers / _size(config, "attnres_num_blocks"))
    size = 1 if mode == "full" else 2 * layers_per_block
    bias = _number(config, "attnres_recency_bias_init", 0.0)
    return AttnResConfig(mode, size, "cumulative", bias)


def _precision(config: dict[str, Any]) -> Precision | None:
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        return None
    # What float16 holds, float32 holds exactly.
    known = {name: precision for precision, name in DTYPE_NAMES.items()} | {"float16": "fp32"}
    if not isinstance(name, str) or name not in known:
        raise _refusal("dtype", name, f"allowed are {', '.join(known)}")
    return known[name]


def _size(config: dict[str, Any], field: str, largest: int = _LARGEST_SIZE) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refusal(field, value, "a whole number above 0 is needed")
    if value > largest:
        raise _refusal(field, value, f"at most {largest} is allowed")
    return value


def _number(config: dict[str, Any], field: str, default: float) -> float:
    value = config.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refusal(field, value, "a number is needed")
    # A whole number may be larger than any that is held.
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise _refusal(field, value, "a finite number is needed")
    return float(value)


def _above_zero(config: dict[str, Any], field: str, default: float) -> float:
    value = _number(config, field, default)
    if value <= 0:
        raise _refusal(field, config[field], "a number above 0 is needed")
    return value


def _switch(config: dict[str, Any], field: str, default: bool) -> bool:
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise _refusal(field, value, "true or false is needed")
    return value


def _one_of(config: dict[str, Any], field: str, allowed: tuple[str, ...]) -> Any:
    value = config.get(field)
    if value not in allowed:
        raise _refusal(field, value, f"allowed is {' or '.join(allowed)}")
    return value


def _refusal(field: str, value: Any, allowed: str) -> InputError:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return InputError(f"{CONFIG_FILE} has {field} {shown}; {allowed}")
