"""The flags of pretrain_attnres.py that describe an imported model, as a file for ``--config``.

No torch.
"""

import shlex
from typing import Any

import yaml

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.model.configuration import ModelConfig

FLAGS_FILE = "model.yaml"


def flags_yaml(
    model: ModelConfig, precision: str, tokenizer: TokenizerConfig | None, save: str
) -> str:
    """The file's text.

    Args:
        model: sizes and residual connections.
        precision: of the parameters that it computes with.
        tokenizer: whose ids it knows, if that is known.
        save: the imported checkpoint's folder.
    """
    flags = _flags(model) | {"precision": precision}
    # Whatever characters a name has, a comment stays one.
    config, load = (
        shlex.quote(path).replace("\n", "\n# ") for path in (f"{save}/{FLAGS_FILE}", save)
    )
    lines = [
        "# The model of this folder. To train it further:",
        f"#   python pretrain_attnres.py --config {config} --load {load} \\",
        "#       --load-weights-only --data-path PREFIX --train-iters N --global-batch-size B ...",
        "# A --seq-length below the one here takes less memory; the model stays the same.",
        yaml.safe_dump(flags, sort_keys=False).rstrip(),
    ]
    if tokenizer is None:
        lines.append("# Its tokenizer is not known: give --tokenizer-type and --tokenizer-model.")
    else:
        named = {
            "tokenizer-type": tokenizer.tokenizer_type,
            "tokenizer-model": tokenizer.tokenizer_model,
        }
        lines.append(yaml.safe_dump(named, sort_keys=False).rstrip())
    return "\n".join(lines) + "\n"


def _flags(model: ModelConfig) -> dict[str, Any]:
    return {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.ffn_hidden_size,
        "num-attention-heads": model.num_attention_heads,
        "num-query-groups": model.num_query_groups,
        "kv-channels": model.kv_channels,
        "seq-length": model.seq_length,
        "rotary-base": model.rotary_base,
        "norm-epsilon": model.norm_epsilon,
        "init-method-std": model.init_method_std,
        "untie-embeddings-and-output-weights": not model.tied_embeddings,
        # Whatever the tokenizer's size, which is not above it, the next multiple is this.
        "make-vocab-size-divisible-by": model.vocab_size,
        **_attn_res_flags(model),
    }


def _attn_res_flags(model: ModelConfig) -> dict[str, Any]:
    attn_res = model.attn_res
    flags: dict[str, Any] = {"attn-res-mode": attn_res.mode}
    if attn_res.mode == "baseline":
        return flags
    if attn_res.mode == "block":
        flags["attn-res-block-size"] = attn_res.block_size
    flags["attn-res-sources"] = attn_res.sources
    if attn_res.recency_bias is not None:
        flags["attn-res-recency-bias"] = attn_res.recency_bias
    return flags
