import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_attnres.data.corpora import standard_library_folder
from megatron_attnres.data.indexed_files import check_prefix

ROOT = Path(__file__).resolve().parents[2]
SOURCES = str(standard_library_folder() / "json")


def command(tool, *args):
    return [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, args)]


def run(tool, *args, cwd):
    return subprocess.run(
        command(tool, *args), capture_output=True, text=True, timeout=120, cwd=cwd, check=False
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    args = ("--input", SOURCES, "--output", "pieces", "--vocab-size", 500, "--json")
    done = run("train_tokenizer", *args, cwd=folder)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["documents"] >= 5
    assert summary["tokens"] > 1000
    assert summary["bytes_per_token"] > 1.5
    return folder / summary["tokenizer_model"]


def test_preprocessing_reads_what_it_can(tmp_path, model):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "good.txt").write_text("some text\n")
    (tmp_path / "in" / "bad.txt").write_bytes(b"\xff")
    args = ("--input", "in", SOURCES, "--exclude", "__pycache__", "--output-prefix", "out/c")
    done = run("preprocess_data", *args, "--tokenizer-model", model, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("skipped in/bad.txt: ")
    assert summary["skipped_files"] == 1
    assert summary["output_prefix"] == "out/c_text_document"
    pair = check_prefix(str(tmp_path / summary["output_prefix"]))
    assert (pair.tokens, pair.documents) == (summary["tokens"], summary["documents"])
    assert summary["bytes_per_token"] == summary["text_bytes"] / summary["tokens"]


def test_flags_from_a_file_and_from_the_command_line(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"ids": "1 2 3"}\n')
    (tmp_path / "config.yaml").write_text(
        "input: [in.jsonl]\njson_keys: ids\noutput-prefix: fromfile\nappend_eod: false\n"
        "tokenizer-type: NullTokenizer\nvocab_size: 9\nworkers: 1\njson: true\n"
    )
    args = ("--config", "config.yaml", "--output-prefix", "given")
    done = run("preprocess_data", *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["tokens"], summary["output_prefix"]) == (3, "given_ids_document")


GOOD = {"--input": "in.txt", "--output-prefix": "out", "--tokenizer-type": "NullTokenizer"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"--input": None}, "--input"),
        ({"--input": "missing.txt"}, "--input missing.txt"),
        ({"--input": "broken.txt"}, ": 1 file(s) read and no document found"),
        ({"--workers": "0"}, "--workers: '0' is not allowed, a whole number of at least 1 is"),
        ({"--workers": "x"}, "--workers: 'x'"),
        ({"--vocab-size": None}, "--vocab-size None"),
        ({"--unknown": "1"}, "--unknown"),
        ({"--tokenizer-type": "Other"}, "'Other' (choose from"),
        ({"--tokenizer-type": "SentencePieceTokenizer"}, "--tokenizer-model: missing"),
        (
            {"--tokenizer-type": "SentencePieceTokenizer", "--tokenizer-model": "in.txt"},
            "--tokenizer-model in.txt: not a readable",
        ),
        ({"--output-prefix": "in.txt/out"}, "output in.txt/out_text_document.bin"),
        ({"--config": "missing.yaml"}, "--config missing.yaml"),
        ({"--config": "unknown.yaml"}, "--config unknown.yaml: unknown key 'inputs'; allowed are"),
        ({"--config": "in.txt"}, "--config in.txt"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, changes, named):
    for name, data in {
        "in.txt": b"1 2",
        "broken.txt": b"\xff",
        "unknown.yaml": b"inputs: 1\n",
    }.items():
        (tmp_path / name).write_bytes(data)
    before = sorted(tmp_path.rglob("*"))
    flags = {**GOOD, "--vocab-size": "9", "--workers": "1", **changes}
    args = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    done = run("preprocess_data", *args, cwd=tmp_path)
    assert done.returncode == 2
    *skipped, line = done.stderr.splitlines()
    assert line.startswith("preprocess_data.py: ")
    assert named in line
    assert all(other.startswith("skipped broken.txt") for other in skipped)
    assert done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_impossible_vocabulary_of_the_trainer(tmp_path):
    args = ("--input", SOURCES, "--output", "pieces", "--vocab-size", 90_000)
    done = run("train_tokenizer", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("train_tokenizer.py: --vocab-size 90000: at most ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tool", ["train_tokenizer", "preprocess_data"])
def test_help_comes_at_once(tool, tmp_path):
    started = time.monotonic()
    done = run(tool, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "what to read:" in done.stdout
    assert "what to make:" in done.stdout
    # Two seconds, as the cores may be busy; torch alone would take longer.
    assert time.monotonic() - started < 2


def start_long_job(folder):
    """Start encoding enough text for many seconds; return when the workers are at it."""
    line = '{"text": "' + "1 2 3 " * 20_000 + '"}\n'
    (folder / "in.jsonl").write_text(line * 400)
    args = ("--input", "in.jsonl", "--output-prefix", "out/c", "--vocab-size", 9)
    process = subprocess.Popen(
        command("preprocess_data", *args, "--tokenizer-type", "NullTokenizer", "--workers", 2),
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background job, which a test run may be, hands down that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while process.poll() is None and not _bytes_written(folder):
        time.sleep(0.05)
    return process


def _bytes_written(folder):
    return sum(path.stat().st_size for path in folder.glob("out/.*/*.bin"))


def assert_ended(process, folder, status, words):
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert errors.splitlines()[0].startswith(f"preprocess_data.py: {words}")
    assert errors.count("\n") == 1, errors
    assert list((folder / "out").iterdir()) == []


def test_ctrl_c_leaves_nothing(tmp_path):
    process = start_long_job(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    assert_ended(process, tmp_path, 130, "interrupted, nothing written")


def test_a_request_to_end_leaves_nothing(tmp_path):
    process = start_long_job(tmp_path)
    process.terminate()
    assert_ended(process, tmp_path, 143, "interrupted, nothing written")


def test_a_killed_worker_ends_the_job(tmp_path):
    process = start_long_job(tmp_path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [
        int(child)
        for child in children
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    os.kill(workers[0], signal.SIGKILL)
    assert_ended(process, tmp_path, 2, "--workers 2: a worker process ended unexpectedly")
