"""Imported models compute what transformers computes, and come back out bit for bit."""

import json
import shutil

import pytest
import torch
from transformers import Qwen3ForCausalLM

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.errors import InputError
from megatron_attnres.interop.exporting import export_checkpoint
from megatron_attnres.interop.importing import import_checkpoint
from megatron_attnres.interop.model_flags import FLAGS_FILE
from megatron_attnres.interop.requested import DEFAULT_RECENCY_BIAS
from megatron_attnres.interop.source import find_source
from megatron_attnres.model.configuration import AttnResConfig
from megatron_attnres.training.checkpoints.description import Description, model_identity
from megatron_attnres.training.checkpoints.folders import newest
from megatron_attnres.training.checkpoints.inspection import StoredCheckpoint
from megatron_attnres.training.checkpoints.stored_model import find_stored_model
from megatron_attnres.training.configuration import read_configuration
from tests.evaluation.checkpoints import make_checkpoint
from tests.interop.models import (
    LONG,
    change_config,
    change_tensors,
    imported,
    make_qwen3,
    our_logits,
    qwen3_config,
    random_tokens,
    tensors_of,
    their_logits,
)
from tests.interop.reproduction import make_reproduction, reproduction_logits
from tests.layouts import small_model
from tests.training.command import as_arguments, make_corpus, run

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCKS = AttnResConfig("block", 4, "cumulative", DEFAULT_RECENCY_BIAS)
FULL = AttnResConfig("full", 1, "cumulative", DEFAULT_RECENCY_BIAS)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def weights_of(save):
    stored = StoredCheckpoint(newest(str(save)))
    return {name: stored.read(name) for name in stored.tensors}


@pytest.mark.parametrize("tied", [False, True])
def test_qwen3_computes_the_same(tied, tmp_path):
    folder = make_qwen3(tmp_path / "theirs", tie_word_embeddings=tied)
    tokens = random_tokens(96, LONG)
    expected = their_logits(folder, tokens)
    assert expected.std() > 1
    found = our_logits(imported(folder, tmp_path / "ours"), tokens)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("attn_res", [BLOCKS, FULL], ids=["block", "full"])
@pytest.mark.parametrize("layers", [3, 28])
def test_qwen3_with_attention_residuals_computes_the_same_at_first(attn_res, layers, tmp_path):
    folder = make_qwen3(tmp_path / "theirs", num_hidden_layers=layers)
    tokens = random_tokens(96, 64)
    expected = their_logits(folder, tokens)
    assert expected.std() > 1
    save = imported(folder, tmp_path / "ours", attn_res=attn_res)
    assert (our_logits(save, tokens) - expected).abs().max() < 1e-4
    # Through its own modeling file as well.
    export_checkpoint(find_stored_model(str(save)), str(tmp_path / "again"), with_tokenizer=False)
    assert (their_logits(tmp_path / "again", tokens) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("mode", "blocks", "layers"),
    [("block", 2, 4), ("block", 3, 5), ("block", 8, 4), ("full", 2, 4)],
)
def test_the_reproduction_computes_the_same(mode, blocks, layers, tmp_path):
    folder = make_reproduction(tmp_path / "theirs", mode, blocks, layers=layers)
    tensors = tensors_of(folder)
    qwen3 = Qwen3ForCausalLM(qwen3_config(num_hidden_layers=layers)).eval()
    plain = {name: one for name, one in tensors.items() if "_res_" not in name}
    qwen3.load_state_dict(plain)
    tokens = random_tokens(96, 40)
    expected = reproduction_logits(qwen3, tensors, mode, blocks, tokens)
    # Readers matter.
    assert (qwen3(tokens).logits - expected).abs().max() > 1
    save = imported(folder, tmp_path / "ours")
    assert (our_logits(save, tokens) - expected).abs().max() < 1e-5
    export_checkpoint(find_stored_model(str(save)), str(tmp_path / "again"), with_tokenizer=False)
    assert (their_logits(tmp_path / "again", tokens) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_qwen3_comes_back_bit_for_bit(dtype, tied, tmp_path):
    folder = make_qwen3(tmp_path / "theirs", DTYPES[dtype], tie_word_embeddings=tied)
    stored = find_stored_model(str(imported(folder, tmp_path / "ours")))
    assert stored.precision == dtype
    export_checkpoint(stored, str(tmp_path / "again"), with_tokenizer=False)
    assert_same(tensors_of(tmp_path / "again"), tensors_of(folder))
    one, other = (find_source(str(tmp_path / name)) for name in ("theirs", "again"))
    assert (one.model, one.precision) == (other.model, other.precision)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "baseline", "block_size": 1},
        {"num_layers": 3, "block_size": 3, "tied": False},
        {"mode": "full", "sources": "cumulative", "recency_bias": 0.5},
    ],
)
def test_our_export_comes_back_bit_for_bit(options, tmp_path):
    model = small_model(**options)
    make_checkpoint(tmp_path / "ours", model, TokenizerConfig("NullTokenizer", vocab_size=60))
    stored = find_stored_model(str(tmp_path / "ours"))
    export_checkpoint(stored, str(tmp_path / "theirs"))
    save = imported(tmp_path / "theirs", tmp_path / "again")
    assert_same(weights_of(save), weights_of(tmp_path / "ours"))
    again = find_stored_model(str(save)).model
    assert model_identity(again) == model_identity(model)
    assert again.seq_length == model.seq_length


def test_what_transformers_saves_of_our_export_comes_back(tmp_path):
    """Trained there, for instance."""
    from tests.interop.models import their_model

    make_checkpoint(tmp_path / "ours", small_model(recency_bias=0.5))
    stored = find_stored_model(str(tmp_path / "ours"))
    export_checkpoint(stored, str(tmp_path / "theirs"), with_tokenizer=False)
    their_model(tmp_path / "theirs").save_pretrained(tmp_path / "saved")
    save = imported(tmp_path / "saved", tmp_path / "again")
    assert_same(weights_of(save), weights_of(tmp_path / "ours"))


def test_several_files_and_an_index(tmp_path):
    folder = make_qwen3(tmp_path / "one")
    expected = weights_of(imported(folder, tmp_path / "ours"))
    model = Qwen3ForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert_same(weights_of(imported(tmp_path / "many", tmp_path / "again")), expected)
    index = tmp_path / "many" / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    for name in ("../one/model.safetensors", "model-00009-of-00003.safetensors"):
        places["weight_map"]["lm_head.weight"] = name
        index.write_text(json.dumps(places))
        with pytest.raises(InputError, match=f"names '?{name}"):
            imported(tmp_path / "many", tmp_path / "wrong")


@pytest.mark.parametrize(
    ("attn_res", "padded"), [(None, 96), (BLOCKS, 96), (FULL, 96), (None, 1237)]
)
def test_training_goes_on_with_the_flags_beside_it(attn_res, padded, tmp_path):
    folder = make_qwen3(tmp_path / "theirs", torch.bfloat16, vocab_size=padded)
    write_tokenizer_files(folder, 90)
    save = imported(folder, tmp_path / "ours", attn_res=attn_res)
    prefix = make_corpus(tmp_path, 60)
    flags = {"data-path": prefix, "train-iters": 1, "global-batch-size": 1, "load": save}
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    config, tokenizer = read_configuration(
        ["--config", str(save / FLAGS_FILE), *arguments, "--load-weights-only"]
    )
    description = Description.read(newest(str(save)))
    assert model_identity(config.model) == description.model
    assert config.model.vocab_size == padded
    assert config.optimizer.precision == "bf16"
    stored = find_stored_model(str(save))
    assert config.tokenizer == stored.tokenizer
    assert tokenizer.vocab_size == stored.open_tokenizer().vocab_size == 90


def test_a_run_is_not_resumed_from_weights_alone(tmp_path):
    folder = make_qwen3(tmp_path / "theirs", vocab_size=96)
    write_tokenizer_files(folder, 90)
    save = imported(folder, tmp_path / "ours")
    flags = {
        "config": save / FLAGS_FILE,
        "data-path": make_corpus(tmp_path, 60),
        "train-iters": 1,
        "global-batch-size": 1,
        "load": save,
    }
    ended = run(as_arguments(flags))
    assert ended.status == 2
    assert ended.stderr.splitlines()[-1].endswith(
        f"--load {save}: holds weights alone, as an import does; add --load-weights-only"
    )


def write_tokenizer_files(folder, ids):
    """A tokenizer of words."""
    words = {"</s>": 0, "<unk>": 1, **{f"w{index}": index for index in range(2, ids)}}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    content = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    (folder / "tokenizer.json").write_text(json.dumps(content | {"added_tokens": []}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_the_tokenizer_goes_along_and_back(tmp_path):
    folder = make_qwen3(tmp_path / "theirs")
    write_tokenizer_files(folder, 90)
    stored = find_stored_model(str(imported(folder, tmp_path / "ours")))
    assert stored.open_tokenizer().tokenize("w3 w89 x") == [3, 89, 1]
    converted = export_checkpoint(stored, str(tmp_path / "again"))
    assert converted.tokenizer == f"of {tmp_path / 'ours' / 'tokenizer'}"
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == {
        "eos_token_id": 0
    }
    again = find_stored_model(str(imported(tmp_path / "again", tmp_path / "ours again")))
    assert again.tokenizer_identity == stored.tokenizer_identity


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    folder = make_qwen3(tmp_path / "theirs")
    write_tokenizer_files(folder, 97)
    with pytest.raises(InputError, match=r"its tokenizer has 97 ids, .* vocab_size 96"):
        imported(folder, tmp_path / "ours")
    assert imported(folder, tmp_path / "ours", with_tokenizer=False)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"not a readable .*give --without-tokenizer"):
        imported(folder, tmp_path / "more")
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "ours"}


NORM = "model.layers.1.input_layernorm.weight"
WRONG = {
    "missing": ({NORM: None}, {}, f"lacks {NORM}"),
    "extra": ({"model.layers.3.x": torch.ones(1)}, {}, "holds model.layers.3.x"),
    "shape": ({NORM: torch.ones(31)}, {}, f"{NORM} is 31; its config.json asks for 32"),
    "vocabulary": ({}, {"vocab_size": 95}, "embed_tokens.weight is 96 x 32; .* asks for 95 x 32"),
    "kind": ({NORM: torch.ones(32, dtype=torch.int64)}, {}, f"{NORM} is I64"),
    "copy": ({}, {"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens"),
}


@pytest.mark.parametrize("what", WRONG)
def test_tensors_that_are_not_the_models_are_named(what, tmp_path):
    tensors, config, message = WRONG[what]
    folder = make_qwen3(tmp_path / "theirs")
    change_tensors(folder, tensors)
    change_config(folder, config)
    with pytest.raises(InputError, match=f"--load {folder}: .*{message}") as caught:
        imported(folder, tmp_path / "ours")
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"theirs"}


def test_a_copy_of_tied_embeddings_is_let_pass(tmp_path):
    folder = make_qwen3(tmp_path / "theirs", tie_word_embeddings=True)
    expected = weights_of(imported(folder, tmp_path / "ours"))
    embedding = tensors_of(folder)["model.embed_tokens.weight"]
    change_tensors(folder, {"lm_head.weight": embedding.clone()})
    assert_same(weights_of(imported(folder, tmp_path / "again")), expected)


def test_a_file_that_is_cut_short_leaves_nothing(tmp_path):
    folder = make_qwen3(tmp_path / "theirs")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model\.safetensors cannot be read") as caught:
        imported(folder, tmp_path / "ours")
    assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(InputError, match="only safetensors are read"):
        imported(folder, tmp_path / "ours")
    assert {one.name for one in tmp_path.iterdir()} == {"theirs"}


def test_a_folder_that_goes_away_while_it_is_read_leaves_nothing(tmp_path, monkeypatch):
    folder = make_qwen3(tmp_path / "theirs")
    source = find_source(str(folder))
    monkeypatch.setattr(
        "megatron_attnres.interop.importing.flags_yaml",
        lambda *arguments: (folder / "model.safetensors").unlink() or "",
    )
    with pytest.raises(InputError, match=f"--load {folder}: ") as caught:
        import_checkpoint(source, str(tmp_path / "ours"))
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"theirs"}


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    folder = make_qwen3(tmp_path / "theirs")

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_attnres.interop.importing.joined", interrupted)
    with pytest.raises(KeyboardInterrupt):
        imported(folder, tmp_path / "new" / "parent" / "ours")
    assert {path.name for path in tmp_path.iterdir()} == {"theirs"}


def test_what_a_killed_run_left_is_replaced(tmp_path):
    folder = make_qwen3(tmp_path / "theirs")
    imported(folder, tmp_path / "ours")
    shutil.move(tmp_path / "ours", tmp_path / "again.writing")
    (tmp_path / "again").mkdir()
    imported(folder, tmp_path / "again")
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "again"}
