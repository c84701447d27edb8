"""Weights & Biases: a run without network, its continuation, and what keeps one from beginning."""

import importlib.util
import re
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from megatron_attnres.errors import InputError
from megatron_attnres.training.arguments import parse_arguments
from megatron_attnres.training.checks import check_arguments
from megatron_attnres.training.run_config import WatchConfig
from megatron_attnres.training.sinks import WandbRun
from tests.training.command import Flags, as_arguments, make_corpus, right_flags, run

PROJECT = {"wandb-project": "attnres", "wandb-mode": "offline"}
# Whatever the machine has: no run of these tests may find a network or a key.
NO_NETWORK = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": ""}

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="the package wandb is not installed"
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> Flags:
    folder = tmp_path_factory.mktemp("wandb")
    return right_flags(make_corpus(folder, vocab_size=60)) | {
        "num-layers": 2,
        "train-iters": 4,
        "data-cache-path": folder / "cache",
    }


def run_files(folder: Path) -> list[Path]:
    """What the offline runs below a folder have written, the oldest first."""
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


@needs_wandb
def test_an_offline_run_and_its_continuation_have_one_id(flags, tmp_path):
    folder = tmp_path / "first try"
    flags = flags | PROJECT | {"run-dir": folder, "load": "auto", "lr-decay-iters": 4}
    # The folder's name carries a time in seconds: the second run must not have the same.
    for iterations in (2, 4):
        answer = run(as_arguments(flags | {"train-iters": iterations}), **NO_NETWORK)
        assert answer.status == 0, answer.stderr
        assert "wandb" not in answer.stdout + answer.stderr, "our own words only"
    files = run_files(folder)
    assert len(files) == 2
    assert len({path.name for path in files}) == 1
    for path in files:
        content = path.read_bytes()
        assert content.count(b"lm_loss") >= 2, "one for each iteration"
        assert b"attnres" in content and b"first try" in content
    assert (folder / "metrics.jsonl").read_text().count("\n") == 4


def watch_config(folder: Path, **changed) -> WatchConfig:
    arguments = parse_arguments([f"--run-dir={folder}", *as_arguments(PROJECT | changed)])
    return WatchConfig(**{name: getattr(arguments, name) for name in WatchConfig.__annotations__})


@needs_wandb
def test_a_run_that_cannot_begin_is_one_line(tmp_path, monkeypatch):
    for name, value in NO_NETWORK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match=r"--wandb-project attnres: .*; --wandb-mode offline"):
        WandbRun(watch_config(tmp_path, **{"wandb-mode": "online"}), {})
    (tmp_path / "wandb").touch()
    with pytest.raises(InputError, match=r"--wandb-project attnres: .*Not a directory"):
        WandbRun(watch_config(tmp_path), {})


@pytest.mark.parametrize(
    "found", [None, ModuleSpec("wandb", None, is_package=True)], ids=["nothing", "a folder"]
)
def test_a_missing_package_is_said_before_anything_else(flags, tmp_path, monkeypatch, found):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    arguments = parse_arguments(as_arguments(flags | PROJECT | {"run-dir": tmp_path}))
    with pytest.raises(InputError) as caught:
        check_arguments(arguments)
    assert re.match(r"--wandb-project attnres: needs the package wandb", str(caught.value))
