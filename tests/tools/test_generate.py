"""The command: what it prints, what it refuses, and how a conversation ends."""

import io
import json
import os
import pty
import runpy
import select
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.errors import InputError
from tests.evaluation.checkpoints import make_checkpoint
from tests.layouts import small_model
from tests.training.command import HIDDEN_VARIABLES, ROOT

CONTEXT = 24
EOD = 60


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    model = small_model(seq_length=CONTEXT)
    tokenizer = TokenizerConfig("NullTokenizer", vocab_size=EOD)
    return make_checkpoint(tmp_path_factory.mktemp("run"), model, tokenizer)


@pytest.fixture(scope="module")
def main():
    return runpy.run_path(str(ROOT / "tools" / "generate.py"))["main"]


@pytest.fixture
def generate(main, run_folder, monkeypatch, tmp_path):
    """Runs the command in this process: (standard output, standard error)."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*flags, stdin=""):
        typed = tmp_path / "typed"
        typed.write_text(stdin)
        out, err = io.StringIO(), io.StringIO()
        with typed.open() as file, redirect_stdout(out), redirect_stderr(err):
            monkeypatch.setattr(sys, "stdin", file)
            main(["--load", str(run_folder), *map(str, flags)])
        return out.getvalue(), err.getvalue()

    yield run
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def objects(generate, *flags):
    out, _ = generate(*flags, "--json")
    return json.loads(out)


def test_one_object(generate, run_folder):
    found = objects(
        generate, "--prompt", "3 14", "", "7 1 8", "--top-k", 20, "--num-samples", 2, "--seed", 5
    )
    assert found["load"] == str(run_folder)
    assert found["iteration"] == 7
    # As many as fit beside the longest prompt.
    assert found["settings"]["max_new_tokens"] == CONTEXT + 1 - 4
    assert found["settings"]["sampling"] == {
        "temperature": 1.0,
        "top_k": 20,
        "top_p": None,
        "seed": 5,
    }
    assert [one["prompt"] for one in found["prompts"]] == ["3 14", "", "7 1 8"]
    assert [one["prompt_ids"] for one in found["prompts"]] == [
        [EOD, 3, 14],
        [EOD],
        [EOD, 7, 1, 8],
    ]
    texts = [text for one in found["prompts"] for text in one["texts"]]
    assert len(texts) == 6
    for text in texts:
        assert text["ended_by"] == ("end of text" if text["ids"][-1] == EOD else "length")
        assert [int(word) for word in text["text"].split()] == [
            id_ for id_ in text["ids"] if id_ != EOD
        ]
    for name, tokens in (("prefill", 6), ("decode", sum(len(text["ids"]) - 1 for text in texts))):
        assert found[name]["tokens"] == tokens
        assert found[name]["tokens_per_second"] == tokens / found[name]["seconds"]


def test_a_text_follows_its_prompt(generate):
    out, err = generate("--prompt", "3 14", "--max-new-tokens", 5, "--ignore-eos")
    (text,) = objects(generate, "--prompt", "3 14", "--max-new-tokens", 5, "--ignore-eos")[
        "prompts"
    ][0]["texts"]
    assert out == f"3 14{text['text']}\n"
    assert err.startswith("5 tokens (length); prefill 3 in ")
    assert err.count("\n") == 1
    streamed, _ = generate("--prompt", "3 14", "--max-new-tokens", 5, "--ignore-eos", "--stream")
    assert streamed == out


def test_several_texts_are_told_apart(generate):
    out, err = generate("--prompt", "3", "5", "--max-new-tokens", 2, "--ignore-eos")
    lines = out.splitlines()
    assert lines[::2] == ["--- prompt 1, text 1: length", "--- prompt 2, text 1: length"]
    assert [line.split()[0] for line in lines[1::2]] == ["3", "5"]
    assert err.startswith("4 tokens (length: 2)")


def test_prompts_of_files(generate, tmp_path):
    lines, objects_file = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_bytes(b"3 14\r\n\n  \n7")
    objects_file.write_text('{"prompt": "3 14"}\n\n{"prompt": "", "other": 1}\n')
    whole = tmp_path / "whole.txt"
    whole.write_text("3\n14\n")
    short = ("--max-new-tokens", 1)
    for flag, path, expected in (
        ("--prompt-file", lines, ["3 14", "7"]),
        ("--prompt-file", objects_file, ["3 14", ""]),
        ("--prompt-whole-file", whole, ["3\n14\n"]),
    ):
        found = objects(generate, flag, path, *short)
        assert [one["prompt"] for one in found["prompts"]] == expected


def test_a_document_start_can_be_left_out(generate):
    found = objects(generate, "--prompt", "3", "--no-document-start", "--max-new-tokens", 1)
    assert found["prompts"][0]["prompt_ids"] == [3]


def test_stops(generate):
    short = ("--prompt", "3 14", "--max-new-tokens", 8, "--ignore-eos")
    text = objects(generate, *short)["prompts"][0]["texts"][0]["text"]
    words = text.split()
    found = objects(generate, *short, "--stop", f" {words[3]}", "99")["prompts"][0]["texts"][0]
    assert found["text"] == text.split(f" {words[3]}")[0]
    assert found["ended_by"] == "stop text"


def test_lines_are_answered_until_the_input_ends(generate):
    out, err = generate("--interactive", "--max-new-tokens", 3, "--ignore-eos", stdin="3\nx\n5 1\n")
    assert len(out.splitlines()) == 2
    assert all(len(line.split()) == 3 for line in out.splitlines())
    assert "this line: " in err
    assert "holds 'x'" in err
    assert err.count("tokens/s") == 4


def write(path, content):
    path.write_bytes(content)
    return path


def bad_flags(folder):
    """Flags after ``--load``, and what the line must say."""
    empty, blank = write(folder / "empty.txt", b""), write(folder / "blank.txt", b"\n \n")
    latin = write(folder / "latin.txt", b"caf\xe9")
    broken = write(folder / "broken.jsonl", b'{"prompt": "3"}\n{"prompt"\n')
    nameless = write(folder / "nameless.jsonl", b'{"text": "3"}\n')
    half = write(folder / "half.jsonl", b'{"prompt": "\\ud800"}\n')
    words = write(folder / "words.txt", b"3\nfour\n")
    three = ["--prompt", "3"]
    return [
        ([], "--prompt"),
        ([*three, "--interactive"], "--interactive: not allowed with"),
        ([*three, "--temperature", "-1"], "--temperature -1.0: must be"),
        ([*three, "--temperature", "nan"], "--temperature nan"),
        ([*three, "--temperature", "hot"], "--temperature"),
        ([*three, "--top-p", "0"], "--top-p 0.0: must be above 0 and at most 1"),
        ([*three, "--top-p", "1.5"], "--top-p 1.5"),
        ([*three, "--top-k", "0"], "--top-k 0"),
        ([*three, "--top-k", "5", "--temperature", "0"], "--top-k 5: has no effect"),
        ([*three, "--num-samples", "2"], "--num-samples 2"),
        ([*three, "--max-new-tokens", "0"], "--max-new-tokens"),
        ([*three, "--max-new-tokens", "24"], "at most 23"),
        ([*three, "--stop", ""], "--stop ''"),
        ([*three, "--json", "--stream"], "--stream"),
        (["--interactive", "--json"], "--json"),
        (["--prompt", "1", "2", "--stream"], "2 prompts"),
        (["--prompt", " ".join("1" * 24)], "25 tokens, and the model's context is 24"),
        (["--prompt", "3", "four"], "--prompt (number 2): --tokenizer-type NullTokenizer"),
        (["--prompt", "caf\udce9"], "no UTF-8"),
        (["--prompt", "", "--no-document-start"], "nothing to begin with"),
        (["--prompt-file", folder / "missing.txt"], "No such file"),
        (["--prompt-file", folder], "Is a directory"),
        (["--prompt-file", empty], "holds no prompt"),
        (["--prompt-file", blank], "holds no prompt"),
        (["--prompt-file", latin], "not UTF-8 (byte 3)"),
        (["--prompt-file", broken], "(line 2): not JSON"),
        (["--prompt-file", nameless], '(line 1): has no text under "prompt"'),
        (["--prompt-file", half], "(line 1): holds what is no UTF-8"),
        (["--prompt-file", words], "(line 2)"),
        (["--prompt-whole-file", empty], "the file is empty"),
        (["--prompt-file", "/dev/null", "--nproc-per-node", "2"], "give a regular file"),
        ([*three, "--tensor-model-parallel-size", "2"], "needs a multiple of 2 ranks"),
        (
            [*three, "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"],
            "is not the tokenizer",
        ),
    ]


def test_bad_input_is_one_line(generate, tmp_path):
    for flags, expected in bad_flags(tmp_path):
        with pytest.raises(InputError) as error:
            generate(*flags)
        assert expected in str(error.value), flags
        assert "\n" not in str(error.value)


def test_a_missing_run_is_named(main, tmp_path):
    with pytest.raises(InputError, match=f"--load {tmp_path}/none: no such folder"):
        main(["--load", f"{tmp_path}/none", "--prompt", "3"])


class Terminal:
    """The command at a terminal of its own."""

    def __init__(self, *flags):
        self._screen, side = pty.openpty()
        environment = {k: v for k, v in os.environ.items() if k not in HIDDEN_VARIABLES}
        self.process = subprocess.Popen(
            [sys.executable, "tools/generate.py", *map(str, flags)],
            cwd=ROOT,
            stdin=side,
            stdout=side,
            stderr=subprocess.PIPE,
            env=environment | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
            # Ctrl-C goes to the processes whose terminal it is.
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )
        os.close(side)

    def type(self, text):
        os.write(self._screen, text.encode())

    def read_until(self, text, seconds=120):
        """What came on the screen up to a text."""
        seen, deadline = "", time.monotonic() + seconds
        while text not in seen:
            ready, _, _ = select.select([self._screen], [], [], deadline - time.monotonic())
            assert ready, f"the screen shows {seen!r}"
            seen += os.read(self._screen, 4096).decode()
        return seen

    def end(self):
        """Exit status, and standard error."""
        try:
            _, errors = self.process.communicate(timeout=60)
            return self.process.returncode, errors.decode()
        finally:
            self.process.kill()
            os.close(self._screen)


def test_ctrl_c_ends_a_conversation_of_two_ranks(run_folder):
    terminal = Terminal(
        "--load",
        run_folder,
        "--interactive",
        "--ignore-eos",
        *("--max-new-tokens", 3),
        *("--nproc-per-node", 2),
        *("--tensor-model-parallel-size", 2),
    )
    terminal.read_until("> ")
    terminal.type("3 14\n")
    answer = terminal.read_until("> ")
    assert len(answer.splitlines()[1].split()) == 3
    terminal.type("\x03")
    status, errors = terminal.end()
    assert status == 0, errors
    # Only how fast the one answer was.
    assert errors.count("\n") == 1, errors
    assert errors.startswith("3 tokens (length)")
