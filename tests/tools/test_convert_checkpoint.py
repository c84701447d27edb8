"""The converter as a command: both ways, what it prints, and what it refuses before torch loads."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_attnres.errors import InputError
from megatron_attnres.interop.joining import joined
from megatron_attnres.interop.names import correspondences
from megatron_attnres.training.checkpoints.description import Description
from megatron_attnres.training.checkpoints.folders import digest_of, folder_of, newest, publish
from megatron_attnres.training.checkpoints.inspection import StoredCheckpoint
from megatron_attnres.training.checkpoints.plans import Piece, PieceSavePlanner
from megatron_attnres.training.checkpoints.stored_model import find_stored_model
from tests.evaluation.checkpoints import make_checkpoint
from tests.interop.models import change_config, make_qwen3, tensors_of
from tests.layouts import small_model
from tests.training.command import ROOT
from tests.training.command import run as run_command

COMMAND = (sys.executable, "tools/convert_checkpoint.py")


@pytest.fixture
def convert(capsys):
    """Runs the command in this process, which has torch already; returns what it prints."""
    main = runpy.run_path(str(ROOT / "tools" / "convert_checkpoint.py"))["main"]

    def run(*arguments):
        main([str(one) for one in arguments])
        return capsys.readouterr().out

    return run


def in_boxes(given: Path, save: Path) -> StoredCheckpoint:
    """A checkpoint as several ranks write it: tensors cut where the ranks' shares meet."""
    stored = StoredCheckpoint(newest(str(given)))
    pieces = []
    for name in stored.tensors:
        tensor = stored.read(name)
        start = 0
        for part in tensor.chunk(2):
            offsets = (start, *(0,) * (tensor.ndim - 1))
            pieces.append(Piece(name, tuple(tensor.shape), offsets, part.contiguous()))
            start += len(part)
    final = folder_of(str(save), 7)
    writing = final.with_name("writing")
    writer = dcp.FileSystemWriter(writing, thread_count=2)
    dcp.save({}, storage_writer=writer, planner=PieceSavePlanner(pieces), no_dist=True)
    Description.read(stored.folder).write(writing)
    publish(writing, final, {path.name: digest_of(path) for path in writing.iterdir()})
    return StoredCheckpoint(final)


def test_a_run_of_any_layout_there_and_back(convert, tmp_path):
    make_checkpoint(tmp_path / "whole", small_model(tied=False, recency_bias=0.5))
    stored = in_boxes(tmp_path / "whole", tmp_path / "run")
    assert any(one.boxes > 1 for one in stored.tensors.values())
    flags = ("--without-tokenizer", "--json", "--save")
    load = ("--load", tmp_path / "run")
    there = json.loads(convert("--to", "hf", *load, *flags, tmp_path / "hf"))
    theirs = tensors_of(tmp_path / "hf")
    assert there == {
        "architecture": "AttnResForCausalLM",
        "parameters": sum(one.numel() for one in theirs.values()),
        "added_parameters": 0,
        "tensors": len(theirs),
        "dtype": "fp32",
        "tokenizer": "none, as asked for",
        "save": str(tmp_path / "hf"),
    }
    for one in correspondences(find_stored_model(str(tmp_path / "run")).model):
        parts = [theirs[part.name] for part in one.theirs]
        assert torch.equal(joined(parts, one), stored.read(f"master.{one.ours.name}"))
    back = json.loads(convert("--from", "hf", "--load", tmp_path / "hf", *flags, tmp_path / "back"))
    assert back == there | {"save": str(tmp_path / "back")}


def test_a_qwen3_model_gets_blocks(tmp_path):
    """The command as it is typed."""
    make_qwen3(tmp_path / "qwen3", torch.bfloat16, num_hidden_layers=4)
    arguments = ["--from", "hf", "--load", tmp_path / "qwen3", "--save", tmp_path / "ours"]
    arguments += ["--attn-res-mode", "block", "--attn-res-num-blocks", "4", "--json"]
    answer = run_command([str(one) for one in arguments], command=COMMAND)
    assert (answer.status, answer.stderr) == (0, "")
    converted = json.loads(answer.stdout)
    # A pseudo-query, a key norm and a bias for each of 8 sublayers and the output head.
    assert converted["added_parameters"] == 9 * (2 * 32 + 1)
    assert (converted["architecture"], converted["dtype"]) == ("Qwen3ForCausalLM", "bf16")
    attn_res = find_stored_model(str(tmp_path / "ours")).model.attn_res
    assert (attn_res.mode, attn_res.block_size, attn_res.sources) == ("block", 2, "cumulative")
    assert attn_res.recency_bias == 16


def test_people_are_told_the_same(convert, tmp_path):
    make_checkpoint(tmp_path / "ours", small_model(mode="baseline"), precision="bf16")
    arguments = ("--load", tmp_path / "ours", "--save", tmp_path / "hf", "--without-tokenizer")
    lines = dict(
        line.split("  ", 1)
        for line in map(str.strip, convert("--to", "hf", *arguments).splitlines())
    )
    assert lines["architecture"] == "Qwen3ForCausalLM"
    assert lines["dtype"] == "bf16"
    assert int(lines["parameters"].replace(",", "")) == sum(
        one.numel() for one in tensors_of(tmp_path / "hf").values()
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of ours, without a known tokenizer, and folders of theirs."""
    folder = tmp_path_factory.mktemp("folders")
    make_checkpoint(folder / "ours", small_model())
    make_qwen3(folder / "qwen3")
    make_qwen3(folder / "moe")
    change_config(folder / "moe", {"model_type": "qwen3_moe"})
    (folder / "full").mkdir()
    (folder / "full" / "notes.txt").write_text("mine")
    return folder


OURS, QWEN3 = ["--load", "{}/ours", "--save", "{}/new"], ["--load", "{}/qwen3", "--save", "{}/new"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--save", "x"], ["--load is missing"]),
        (["--to", "hf", "--load", "{}/ours"], ["--save is missing"]),
        (OURS, ["--to hf or --from hf"]),
        (["--to", "hf", "--from", "hf", *OURS], ["--to hf or --from hf"]),
        (["--to", "gguf", *OURS], ["--to", "gguf"]),
        (["--to", "hf", "--load", "{}/nowhere", "--save", "{}/new"], ["--load {}/nowhere"]),
        (["--to", "hf", "--load", "{}/ours", "--save", "{}/full"], ["--save {}/full", "new"]),
        (["--to", "hf", *OURS, "--attn-res-mode", "full"], ["--attn-res-mode full", "--from hf"]),
        (["--to", "hf", *OURS], ["--load {}/ours", "does not name its tokenizer"]),
        (["--from", "hf", *QWEN3, "--dtype", "bf16"], ["--dtype bf16", "--to hf"]),
        (["--from", "hf", *QWEN3, "--vocab-size", "9"], ["--vocab-size 9", "--to hf"]),
        (["--from", "hf", *OURS], ["--load {}/ours", "config.json"]),
        (["--from", "hf", "--load", "{}/moe", "--save", "{}/new"], ["{}/moe", "model_type", "moe"]),
        (
            ["--from", "hf", *QWEN3, "--attn-res-block-size", "2"],
            ["--attn-res-block-size 2", "--attn-res-mode block"],
        ),
        (
            ["--from", "hf", *QWEN3, "--attn-res-mode", "full", "--attn-res-num-blocks", "2"],
            ["--attn-res-num-blocks 2"],
        ),
        (
            ["--from", "hf", *QWEN3, "--attn-res-mode", "block", "--attn-res-num-blocks", "4"],
            ["--attn-res-num-blocks 4", "6 sublayers"],
        ),
        (
            ["--from", "hf", *QWEN3, "--attn-res-mode", "full", "--attn-res-recency-bias", "nan"],
            ["--attn-res-recency-bias nan"],
        ),
        (
            ["--from", "hf", *QWEN3, "--attn-res-mode", "full", "--attn-res-recency-bias", "1e39"],
            ["--attn-res-recency-bias 1e+39"],
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(convert, folders, arguments, words):
    before = sorted(folders.rglob("*"))
    with pytest.raises(InputError) as caught:
        convert(*(one.format(folders) for one in arguments))
    assert "\n" not in str(caught.value)
    assert all(word.format(folders) in str(caught.value) for word in words), str(caught.value)
    assert sorted(folders.rglob("*")) == before


def test_flags_are_for_models_with_standard_residuals(convert, folders, tmp_path):
    convert(
        "--to", "hf", "--load", folders / "ours", "--save", tmp_path / "hf", "--without-tokenizer"
    )
    with pytest.raises(InputError, match="--attn-res-mode full: is for Qwen3 models"):
        convert(
            *("--from", "hf", "--load", tmp_path / "hf", "--save", tmp_path / "back"),
            *("--attn-res-mode", "full"),
        )


def test_what_is_wrong_is_said_before_torch_loads(folders):
    command = (sys.executable, "-X", "importtime", COMMAND[1])
    arguments = ["--from", "hf", "--load", f"{folders}/moe", "--save", f"{folders}/new"]
    answer = run_command(arguments, command=command)
    assert (answer.status, answer.stdout) == (2, "")
    *imports, message = answer.stderr.splitlines()
    assert message.startswith("convert_checkpoint.py: --load ")
    modules = {line.rpartition("|")[2].strip() for line in imports}
    assert "megatron_attnres.interop.source" in modules
    assert not {"torch", "numpy", "transformers"} & modules
