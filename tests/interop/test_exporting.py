"""Exported models in transformers: our logits, our greedy text, any cache, padded batches."""

import ast
import json
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.corpora import Corpus
from megatron_attnres.data.tokenizer_training import train_tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.interop import modeling_attnres
from megatron_attnres.interop.exporting import export_checkpoint
from megatron_attnres.model.inference import Decoder
from megatron_attnres.training.checkpoints.folders import newest
from megatron_attnres.training.checkpoints.stored_model import find_stored_model
from tests.evaluation.checkpoints import make_checkpoint, shapes_of
from tests.interop.models import (
    LONG,
    our_logits,
    our_model,
    random_tokens,
    tensors_of,
    their_logits,
    their_model,
)
from tests.layouts import small_model

NULL = TokenizerConfig("NullTokenizer", vocab_size=60)
MODELS = {
    "baseline": {"mode": "baseline"},
    "baseline, untied": {"mode": "baseline", "tied": False},
    "block": {},
    "blocks end inside layers": {"num_layers": 3, "block_size": 3, "tied": False},
    "block, biased": {"recency_bias": 0.5},
    "block, cumulative": {"sources": "cumulative", "block_size": 3},
    "full": {"mode": "full"},
    "full, cumulative, biased": {"mode": "full", "sources": "cumulative", "recency_bias": 2.0},
}


def model_of(name):
    """Random weights of 0.3 make large logits; the base is that of long contexts."""
    return replace(small_model(**MODELS[name], seq_length=512), rotary_base=1e6, kv_channels=6)


def exported(tmp_path, model, **options):
    make_checkpoint(tmp_path / "ours", model, NULL)
    stored = find_stored_model(str(tmp_path / "ours"))
    return export_checkpoint(stored, str(tmp_path / "theirs"), **options)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_ours(name, tmp_path):
    model = model_of(name)
    converted = exported(tmp_path, model)
    tokens = random_tokens(model.vocab_size, LONG)
    ours = our_logits(tmp_path / "ours", tokens)
    assert (their_logits(tmp_path / "theirs", tokens) - ours).abs().max() < 1e-5
    assert converted.parameters == sum(torch.Size(one).numel() for one in shapes_of(model).values())
    tensors = tensors_of(tmp_path / "theirs")
    assert converted.parameters == sum(one.numel() for one in tensors.values())
    assert converted.tensors == len(tensors)


@torch.inference_mode()
def greedy(chunk, prompt, count):
    decoder = Decoder(chunk, prompt.shape[0], prompt.shape[1] + count)
    tokens = [decoder.next_logits(prompt).argmax(-1, keepdim=True)]
    while len(tokens) < count:
        tokens.append(decoder.next_logits(tokens[-1]).argmax(-1, keepdim=True))
    return torch.cat(tokens, dim=1)


@pytest.mark.parametrize(
    "name", ["baseline", "blocks end inside layers", "full, cumulative, biased"]
)
def test_greedy_text_is_ours_with_any_cache_and_with_none(name, tmp_path):
    model = model_of(name)
    exported(tmp_path, model)
    prompt, count = random_tokens(60, 9), 64
    with our_model(tmp_path / "ours") as chunk:
        expected = greedy(chunk, prompt, count)
    theirs = their_model(tmp_path / "theirs")
    for options in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        found = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **options,
        )
        assert torch.equal(found[:, prompt.shape[1] :], expected), options


def test_rows_padded_on_the_left_are_as_if_alone(tmp_path):
    exported(tmp_path, model_of("block, biased"))
    model = their_model(tmp_path / "theirs")
    long, short = random_tokens(60, 9, rows=1), random_tokens(60, 4, rows=1)
    rows = torch.cat((long, torch.nn.functional.pad(short, (5, 0))))
    mask = torch.ones_like(rows)
    mask[1, :5] = 0
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    together = model.generate(rows, attention_mask=mask, **options)
    for row, alone in zip(together, (long, short), strict=True):
        expected = model.generate(alone, attention_mask=torch.ones_like(alone), **options)[0]
        assert torch.equal(row[-len(expected) :], expected)


def test_losses_hidden_states_and_gradients(tmp_path):
    exported(tmp_path, model_of("block, biased"))
    model = their_model(tmp_path / "theirs")
    tokens = random_tokens(60, 12)
    found = model(tokens, labels=tokens, output_hidden_states=True)
    expected = torch.nn.functional.cross_entropy(
        found.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    assert torch.allclose(found.loss, expected)
    assert len(found.hidden_states) == model.config.num_hidden_layers + 1
    assert torch.equal(found.hidden_states[0], model.get_input_embeddings()(tokens))
    assert torch.equal(model.lm_head(found.hidden_states[-1]), found.logits)
    model.train()
    model(tokens, labels=tokens).loss.backward()
    plain = {name: one.grad.clone() for name, one in model.named_parameters()}
    # Of one source there is nothing to choose.
    unread = {"attn_res_proj.weight", "attn_res_norm.weight", "attn_res_bias"}
    assert {name for name, grad in plain.items() if not grad.any()} == {
        f"model.layers.0.{name}" for name in unread
    }
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(tokens, labels=tokens).loss.backward()
    assert all(torch.equal(one.grad, plain[name]) for name, one in model.named_parameters())


def test_a_new_model_reads_all_sources_alike():
    config = modeling_attnres.AttnResConfig(
        **their_sizes(), attn_res_block_size=3, attn_res_recency_bias=True
    )
    model = modeling_attnres.AttnResForCausalLM(config)
    readers = {name: one for name, one in model.named_parameters() if "_res_" in name}
    assert len(readers) == 3 * (2 * 4 + 1)
    assert all(
        torch.equal(one, torch.ones_like(one) if "norm" in name else torch.zeros_like(one))
        for name, one in readers.items()
    )
    with pytest.raises(ValueError, match="attn_res_block_size 2"):
        modeling_attnres.AttnResConfig(attn_res_mode="full", attn_res_block_size=2)
    with pytest.raises(ValueError, match="attn_res_sources 'all'"):
        modeling_attnres.AttnResConfig(attn_res_sources="all")


def their_sizes():
    return {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }


def test_what_lies_in_the_folder(tmp_path):
    converted = exported(tmp_path, small_model(), precision="bf16")
    folder = tmp_path / "theirs"
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_attnres.py",
    }
    assert (converted.dtype, converted.architecture) == ("bf16", "AttnResForCausalLM")
    assert "NullTokenizer" in converted.tokenizer
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": 60}
    assert {one.dtype for one in tensors_of(folder).values()} == {torch.bfloat16}
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert len(modes) == 1
    assert not (tmp_path / "theirs.writing").exists()


def test_text_in_text_out(tmp_path):
    path = tmp_path / "ours.model"
    train_tokenizer(Corpus([textwrap.__file__]), path, 500)
    config = TokenizerConfig("SentencePieceTokenizer", str(path))
    model = replace(small_model(recency_bias=0.5, seq_length=64), vocab_size=512)
    make_checkpoint(tmp_path / "ours", model, config)
    stored = find_stored_model(str(tmp_path / "ours"))
    converted = export_checkpoint(stored, str(tmp_path / "theirs"))
    assert converted.tokenizer == f"of {path}"
    folder = tmp_path / "theirs"
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    ours = stored.open_tokenizer()
    theirs = their_model(folder)
    assert (theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id) == (2, 0)
    prompts = ["def wrap(self, text):\n    ", "x"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    rows = theirs.generate(**batch, max_new_tokens=12, do_sample=False, eos_token_id=None)
    with our_model(tmp_path / "ours") as chunk:
        for row, prompt in zip(rows, prompts, strict=True):
            ids = ours.tokenize(prompt)
            assert row[-12 - len(ids) : -12].tolist() == ids
            assert torch.equal(row[-12:], greedy(chunk, torch.tensor([ids]), 12)[0])
            assert tokenizer.decode(row[:-12], skip_special_tokens=True) == prompt


def test_standard_residuals_need_no_code_of_ours(tmp_path):
    exported(tmp_path, small_model(mode="baseline"))
    assert not list((tmp_path / "theirs").glob("*.py"))
    assert type(their_model(tmp_path / "theirs")) is Qwen3ForCausalLM


def test_the_modeling_file_needs_torch_and_transformers_alone():
    tree = ast.parse(Path(modeling_attnres.__file__).read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
    assert imported == {"typing", "torch", "transformers"}


def test_large_models_are_spread_over_files(tmp_path):
    model = small_model(tied=False)
    exported(tmp_path, model, max_file_bytes=8000)
    folder = tmp_path / "theirs"
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = tensors_of(folder)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in tensors.values())
    tokens = random_tokens(60, 8)
    ours = our_logits(tmp_path / "ours", tokens)
    assert (their_logits(folder, tokens) - ours).abs().max() < 1e-5


@pytest.mark.parametrize("what", ["damaged", "missing", "taken", "no tokenizer", "a file"])
def test_nothing_is_left_of_what_cannot_be_done(what, tmp_path):
    folder = newest(str(make_checkpoint(tmp_path / "ours", small_model())))
    stored = find_stored_model(str(tmp_path / "ours"))
    save, options = tmp_path / "theirs", {"with_tokenizer": what == "no tokenizer"}
    if what == "damaged":
        victim = min(folder.glob("*.distcp"))
        victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    elif what == "missing":
        (folder / ".metadata").unlink()
    elif what == "taken":
        save.mkdir()
        (save / "notes.txt").write_text("mine")
    elif what == "a file":
        save.write_text("mine")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises(InputError) as caught:
        export_checkpoint(stored, str(save), **options)
    flag = f"--save {save}" if what in ("taken", "a file") else f"--load {tmp_path / 'ours'}"
    assert str(caught.value).startswith(flag)
    assert "\n" not in str(caught.value)
    after = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert after == before
