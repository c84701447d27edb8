"""The evaluation command: runs side by side, on any layout; one line for what cannot be used."""

import json
import runpy
import sys
from dataclasses import replace

import pytest

from megatron_attnres.errors import InputError
from tests.evaluation.checkpoints import make_checkpoint
from tests.evaluation.text import HELLASWAG, WIKITEXT, make_tokenizer
from tests.layouts import small_model
from tests.training.command import ROOT
from tests.training.command import run as run_command

TOOL = ROOT / "tools/evaluate.py"
CONTEXT = 64
ON_TWO_STAGES = [
    "--nproc-per-node=2",
    "--pipeline-model-parallel-size=2",
    "--virtual-pipeline-model-parallel-size=2",
]


@pytest.fixture(scope="module")
def main():
    return runpy.run_path(str(TOOL))["main"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with standard residuals and one with blocks."""
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = make_tokenizer(folder)
    for mode in ("baseline", "block"):
        model = replace(small_model(mode=mode, seq_length=CONTEXT), vocab_size=512)
        make_checkpoint(folder / mode, model, tokenizer)
    return [str(folder / mode) for mode in ("baseline", "block")]


@pytest.fixture(scope="module")
def asked(runs):
    return [
        *("--load", *runs, "--text", str(WIKITEXT), "--json-keys", "page", "--stride", "48"),
        *("--tasks", "hellaswag", "--task-data", f"hellaswag={HELLASWAG}", "--limit", "4"),
    ]


def test_stages_give_the_figures_of_one_process_to_the_last_bit(main, asked, tmp_path, capsys):
    main([*asked, "--json"])
    one = json.loads(capsys.readouterr().out)
    output = tmp_path / "figures.json"
    finished = run_command(
        [*asked, *ON_TWO_STAGES, "--output", str(output)], command=(sys.executable, str(TOOL))
    )
    assert (finished.status, finished.stderr) == (0, "")
    two = json.loads(output.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]

    assert (one["layout"]["pipeline"], two["layout"]["pipeline"]) == (1, 2)
    measured = ("seconds", "tokens_per_second")
    for first, second in zip(one["runs"], two["runs"], strict=True):
        assert all(first.pop(name) > 0 and second.pop(name) > 0 for name in measured)
        assert first == second
    assert [run["mode"] for run in one["runs"]] == ["baseline", "block"]
    assert one["runs"][0]["perplexity"] != one["runs"][1]["perplexity"]
    assert one["runs"][0]["perplexity"]["documents"] == 4
    assert one["runs"][0]["positions"] > one["runs"][0]["perplexity"]["tokens"]
    assert one["settings"]["stride"] == 48

    lines = finished.stdout.splitlines()
    assert lines[0] == f"perplexity of {WIKITEXT}"
    assert lines[2].split() == ["baseline", "(baseline)", "block", "(block)"]
    assert any(line.startswith("hellaswag acc_norm, 4 documents") for line in lines)


def test_a_data_set_that_cannot_be_had_is_one_line_from_all_ranks(runs):
    finished = run_command(
        ["--load", runs[0], "--tasks", "wikitext2", *ON_TWO_STAGES],
        command=(sys.executable, str(TOOL)),
        HF_HUB_OFFLINE="1",
    )
    assert finished.status == 2
    assert finished.stdout == ""
    (line,) = finished.stderr.splitlines()
    assert line.startswith("evaluate.py: --tasks wikitext: its data set EleutherAI/wikitext")
    assert line.endswith("give --task-data wikitext=FILE.jsonl")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "--tasks: missing"),
        (["--text", "gone.txt"], "--text gone.txt: no such file"),
        (["--data-path", "gone"], "--data-path gone: gone.idx does not exist"),
        (["--text", str(TOOL), "--data-path", "x"], "not allowed with"),
        (["--text", str(TOOL), "--context", "65"], "--context 65: .* trained on 64 tokens"),
        (["--text", str(TOOL), "--stride", "65"], "--stride 65: is more than the context of 64"),
        (
            ["--text", str(TOOL), "--context", "32", "--stride", "33"],
            "--stride 33: is more than the context of 32",
        ),
        (["--text", str(TOOL), "--stride", "0"], "--stride: '0' is not allowed"),
        (["--tasks", ","], "--tasks ',': names no task"),
        (["--tasks", "wikitext", "--limit", "0"], "--limit: '0' is not allowed"),
        (["--tasks", "wikitext", "--stride", "5"], "--stride 5: needs --text or --data-path"),
        (["--text", str(TOOL), "--limit", "5"], "--limit 5: needs --tasks"),
        (["--text", str(TOOL), "--task-data", "a=b"], "--task-data a=b: needs --tasks"),
        (
            ["--tasks", "wikitext", "--task-data", f"hellaswag={HELLASWAG}"],
            "hellaswag is not asked for",
        ),
        (["--tasks", "wikitext", "--include-path", "gone"], "--include-path gone: no such folder"),
        (["--text", str(TOOL), "--output", str(ROOT)], "--output .*: is a folder"),
        (
            ["--text", str(TOOL), "--pipeline-model-parallel-size", "2"],
            "--pipeline-model-parallel-size 2: needs a multiple of 2 ranks",
        ),
    ],
)
def test_flags_that_make_no_sense_are_one_line(main, runs, flags, complaint):
    with pytest.raises(InputError, match=complaint) as error:
        main(["--load", runs[0], *flags])
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_is_not_the_models_is_named(main, runs, tmp_path):
    (tmp_path / "ids.txt").write_text("1 2")
    flags = ["--text", str(tmp_path / "ids.txt"), "--tokenizer-type", "NullTokenizer"]
    with pytest.raises(InputError, match="is not the tokenizer of"):
        main(["--load", runs[0], *flags, "--vocab-size", "60"])


def test_text_without_a_document_is_named(main, runs, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match=r"--text.* no document found"):
        main(["--load", runs[0], "--text", str(tmp_path)])
