"""The command that measures depth weights, as a user calls it."""

import json
import runpy
import sys
import time

import pytest

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.errors import InputError
from tests.evaluation.checkpoints import make_checkpoint
from tests.layouts import small_model
from tests.training.command import ROOT, make_corpus
from tests.training.command import run as run_command

TOOL = "tools/plot_depth_attention.py"
TOKENIZER = TokenizerConfig("NullTokenizer", vocab_size=60)
FILES = {
    "depth_weights.json",
    "depth_weights.png",
    "magnitudes.png",
    "report.html",
    "token_weights.json",
    "token_weights.png",
}


def plot_here(*arguments: object) -> None:
    """In this process, which has torch already."""
    runpy.run_path(str(ROOT / TOOL))["main"]([str(one) for one in arguments])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with two models and a corpus of their tokenizer."""
    folder = tmp_path_factory.mktemp("runs")
    for mode in ("block", "baseline"):
        make_checkpoint(folder / mode, small_model(num_layers=3, mode=mode), TOKENIZER)
    make_corpus(folder, 60)
    return folder


def read(folder, name="depth_weights.json"):
    return json.loads((folder / name).read_text())


def test_a_prompt_from_the_command_line(runs, tmp_path):
    output = tmp_path / "new" / "folder"
    command = (sys.executable, TOOL, "--load", str(runs / "block"), "--prompt", "5 6 7 8 9 1 2")
    answer = run_command(["--output", str(output), "--json"], command=command)
    assert (answer.status, answer.stderr) == (0, "")
    printed = json.loads(answer.stdout)
    assert printed == read(output)
    assert {path.name for path in output.iterdir()} == FILES
    assert printed["sources"] == ["embedding", "block 1", "block 2"]
    assert printed["text"] == {"origin": "prompt", "tokens": 7}
    assert set(printed["definitions"]) == {
        "weight",
        "source",
        "output magnitude",
        "gradient magnitude",
    }
    readers = printed["readers"]
    assert [(one["layer"], one["sublayer"]) for one in readers[:2]] == [
        (1, "attention"),
        (1, "mlp"),
    ]
    assert (readers[-1]["layer"], readers[-1]["sublayer"]) == (None, "head")
    partial = [None, "block 1", "block 1", "block 1", None, "block 2", None]
    assert [one["partial"] for one in readers] == partial
    assert all(sum(one["weights"].values()) == pytest.approx(1) for one in readers)
    assert len(printed["magnitudes"]["gradient"]) == 3

    tokens = read(output, "token_weights.json")
    assert [one["id"] for one in tokens["tokens"]] == [5, 6, 7, 8, 9, 1, 2]
    for one, mean in zip(tokens["readers"], readers, strict=True):
        for source, weights in one["weights"].items():
            assert sum(weights) / 7 == pytest.approx(mean["weights"][source], abs=2e-6)


def test_files_and_corpora_are_cut_at_the_tokens(runs, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(" ".join(map(str, range(50))))
    [index] = runs.glob("*.idx")
    texts = {"--text": tmp_path / "a.txt", "--data-path": index.with_suffix("")}
    for flag, value in texts.items():
        arguments = ["--load", runs / "block", flag, value, "--output", tmp_path, "--tokens", 21]
        plot_here(*arguments, "--shown-tokens", 3)
        assert "21 tokens of" in capsys.readouterr().out
        assert read(tmp_path)["magnitudes"]["predictions"] == 20
        assert len(read(tmp_path, "token_weights.json")["tokens"]) == 3


def test_a_baseline_has_magnitudes_alone(runs, tmp_path, capsys):
    arguments = ["--load", runs / "baseline", "--prompt", "1 2 3", "--output", tmp_path]
    with pytest.raises(InputError, match="is a baseline, which has no depth weights"):
        plot_here(*arguments)
    assert list(tmp_path.iterdir()) == []
    plot_here(*arguments, "--magnitudes-only", "--json")
    printed = json.loads(capsys.readouterr().out)
    assert printed["readers"] is None
    assert len(printed["magnitudes"]["output"]) == 3
    assert {one.name for one in tmp_path.iterdir()} == {"depth_weights.json", "magnitudes.png"}


def test_a_model_that_has_diverged_is_named(runs, tmp_path, monkeypatch):
    from tests.evaluation import checkpoints

    random = checkpoints._random
    monkeypatch.setattr(checkpoints, "_random", lambda *all: random(*all) * float("nan"))
    run = make_checkpoint(tmp_path / "run", small_model(num_layers=1), TOKENIZER)
    with pytest.raises(InputError, match=f"--load {run}: .* not finite"):
        plot_here("--load", run, "--prompt", "1 2 3", "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--load"]),
        (["--load", "{}/nowhere", "--prompt", "1 2", "--output", "{}/out"], ["{}/nowhere"]),
        (["--load", "{}/block", "--output", "{}/out"], ["--text", "--data-path", "--prompt"]),
        (
            ["--load", "{}/block", "--prompt", "1 2", "--text", "a", "--output", "{}/out"],
            ["--text"],
        ),
        (["--load", "{}/block", "--prompt", "1 2", "--output", "{}/a file"], ["is a file"]),
        (["--load", "{}/block", "--prompt", "1 2", "--output", "{}/a file/b"], ["no folder"]),
        (["--load", "{}/block", "--prompt", "1 2", "--output", "a" * 300], ["too long"]),
        (["--load", "{}/block", "--prompt", "1", "--output", "{}/out"], ["has 1 token"]),
        (["--load", "{}/block", "--prompt", "a b", "--output", "{}/out"], ["'a'"]),
        (["--load", "{}/block", "--prompt", "1 " * 9, "--output", "{}/out"], ["context 8"]),
        (
            ["--load", "{}/block", "--text", "{}/empty.txt", "--output", "{}/out"],
            ["no document found"],
        ),
        (["--load", "{}/block", "--data-path", "{}/x", "--output", "{}/out"], ["{}/x.idx"]),
        (
            ["--load", "{}/block", "--prompt", "1 2", "--tokens", "1", "--output", "{}/out"],
            ["--tokens"],
        ),
    ],
)
def test_bad_input_is_one_line_and_fast(runs, arguments, words):
    (runs / "a file").write_text("x")
    (runs / "empty.txt").write_text("")
    begun = time.monotonic()
    with pytest.raises(InputError) as caught:
        plot_here(*(one.format(runs) for one in arguments))
    assert time.monotonic() - begun < 2
    assert "\n" not in str(caught.value)
    assert all(word.format(runs) in str(caught.value) for word in words), str(caught.value)
    assert not (runs / "out").exists()
