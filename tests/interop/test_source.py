"""What a folder's config.json says, and what is refused of it, by name."""

import json
from dataclasses import replace

import pytest

from megatron_attnres.errors import InputError
from megatron_attnres.interop.hf_config import config_json
from megatron_attnres.interop.source import find_source
from megatron_attnres.model.configuration import AttnResConfig
from megatron_attnres.training.checkpoints.description import model_identity
from tests.interop.models import qwen3_config
from tests.layouts import small_model

QWEN3 = config_json(small_model(mode="baseline"), "bf16", 3)
REPRODUCTION = QWEN3 | {
    "architectures": ["Qwen3AttnResForCausalLM"],
    "model_type": "qwen3_attnres",
    "attnres_mode": "block",
    "attnres_num_blocks": 3,
    "attnres_gate_type": "bias",
    "attnres_recency_bias_init": 3.0,
}
OURS = config_json(small_model(), "fp32", None)


def find(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return find_source(str(folder))


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "baseline", "block_size": 1},
        {"block_size": 3, "tied": False},
        {"mode": "full", "sources": "cumulative", "recency_bias": 0.0},
    ],
)
def test_what_is_written_is_read(options, tmp_path):
    model = small_model(**options)
    source = find(tmp_path, config_json(model, "bf16", None))
    assert source.precision == "bf16"
    assert model_identity(source.model) == model_identity(model)
    assert replace(source.model, attn_res=model.attn_res) == model


def test_transformers_own_file_is_read(tmp_path):
    qwen3_config(dtype="float16").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    source = find(tmp_path, config | {"architectures": ["Qwen3ForCausalLM"]})
    model = source.model
    assert (model.kv_channels, model.rotary_base, model.norm_epsilon) == (16, 1e6, 1e-5)
    assert (model.seq_length, model.tied_embeddings, source.precision) == (512, False, "fp32")


def test_older_releases_wrote_the_rotary_base_elsewhere(tmp_path):
    old = {name: value for name, value in QWEN3.items() if name != "rope_parameters"}
    assert find(tmp_path, old | {"rope_theta": 5e5, "rope_scaling": None}).model.rotary_base == 5e5
    assert find(tmp_path, {**old, "rope_theta": None}).model.rotary_base == 10_000.0


@pytest.mark.parametrize(("blocks", "size"), [(1, 8), (2, 4), (3, 4), (4, 2), (9, 2)])
def test_the_reproductions_blocks_are_whole_layers(blocks, size, tmp_path):
    model = find(tmp_path, REPRODUCTION | {"attnres_num_blocks": blocks}).model
    assert model.attn_res == AttnResConfig("block", size, "cumulative", 3.0)
    full = find(tmp_path, REPRODUCTION | {"attnres_mode": "full"}).model
    assert full.attn_res == AttnResConfig("full", 1, "cumulative", 3.0)


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (QWEN3, {"model_type": "qwen3_moe"}),
        (QWEN3, {"model_type": None}),
        (QWEN3, {"architectures": ["Qwen3ForSequenceClassification"]}),
        (QWEN3, {"attention_bias": True}),
        (QWEN3, {"attention_dropout": 0.1}),
        (QWEN3, {"hidden_act": "gelu"}),
        (QWEN3, {"num_experts": 8}),
        (QWEN3, {"quantization_config": {"quant_method": "fp8"}}),
        (QWEN3, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        (QWEN3, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        (QWEN3, {"model_type": ["qwen3"]}),
        (QWEN3, {"dtype": ["float32"]}),
        (QWEN3, {"layer_types": 4}),
        (QWEN3, {"layer_types": [["full_attention"]]}),
        (QWEN3, {"num_hidden_layers": 0}),
        (QWEN3, {"num_hidden_layers": 10**30}),
        (QWEN3, {"max_position_embeddings": 10**30}),
        (QWEN3, {"num_key_value_heads": 3}),
        (QWEN3, {"head_dim": None}),
        (QWEN3, {"head_dim": 5}),
        (QWEN3, {"hidden_size": "16"}),
        (QWEN3, {"rms_norm_eps": True}),
        (QWEN3, {"rms_norm_eps": 10**400}),
        (QWEN3, {"rms_norm_eps": -1e-6}),
        (QWEN3, {"rope_theta": 0}),
        (QWEN3, {"initializer_range": -0.02}),
        (QWEN3, {"tie_word_embeddings": "yes"}),
        (QWEN3, {"dtype": "float8_e4m3fn"}),
        (REPRODUCTION, {"attnres_gate_type": "sigmoid_scalar"}),
        (REPRODUCTION, {"attnres_mode": "delta"}),
        (REPRODUCTION, {"attnres_capacity": 3}),
        (OURS, {"attn_res_mode": "baseline"}),
        (OURS, {"attn_res_mode": "full"}),
        (OURS, {"attn_res_operator": "fused"}),
    ],
)
def test_what_cannot_be_ours_is_named(config, changes, tmp_path):
    with pytest.raises(InputError) as caught:
        find(tmp_path, config | changes)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"--load {tmp_path}: ")
    field, value = next(iter(changes.items()))
    field = {"attn_res_mode": "attn_res"}.get(field, field)
    assert field in message
    if field != "attn_res":
        assert json.dumps(value)[:20] in message


def test_windows_that_no_layer_uses_are_let_pass(tmp_path):
    changes = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}
    assert find(tmp_path, QWEN3 | changes).model.num_layers == 4
    assert find(tmp_path, QWEN3 | {"sliding_window": 8, "max_window_layers": 0}).model


@pytest.mark.parametrize("content", [None, "{", "[]", "[" * 100_000])
def test_a_folder_without_a_configuration_is_named(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=f"--load {tmp_path}: .*config.json") as caught:
        find_source(str(tmp_path))
    assert "\n" not in str(caught.value)
