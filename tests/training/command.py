"""Running pretrain_attnres.py as a user does, with a corpus and flags that are small and right."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.corpora import Corpus
from megatron_attnres.data.preprocess import preprocess

ROOT = Path(__file__).parent.parent.parent
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Under pytest the progress bar is off; a user sees it.
HIDDEN_VARIABLES = (*LAUNCHER_VARIABLES, "PYTEST_CURRENT_TEST")

# What differs between two runs that compute the same.
MEASURED_FIELDS = {
    "step_seconds",
    "tokens_per_second",
    "tokens_per_second_per_rank",
    "model_tflops_per_rank",
    "compute_seconds",
    "p2p_wait_seconds",
    "gradient_seconds",
    "update_seconds",
    "peak_memory_bytes",
    "save_pause_seconds",
}

Flags = dict[str, Any]


class Finished(NamedTuple):
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


def make_corpus(folder: Path, vocab_size: int) -> str:
    """The prefix of 40 documents of 50 random token ids."""
    ids = np.random.default_rng(0).integers(0, vocab_size, (40, 50))
    text = folder / "ids.jsonl"
    text.write_text("".join(json.dumps({"text": " ".join(map(str, row))}) + "\n" for row in ids))
    tokenizer = TokenizerConfig("NullTokenizer", vocab_size=vocab_size)
    return preprocess(Corpus([text]), tokenizer, str(folder / "corpus")).output_prefix


def right_flags(prefix: str) -> Flags:
    """Flags that train a model of four layers on one rank."""
    return {
        "num-layers": 4,
        "hidden-size": 16,
        "ffn-hidden-size": 32,
        "num-attention-heads": 4,
        "num-query-groups": 2,
        "seq-length": 16,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": 60,
        "data-path": prefix,
        "train-iters": 1,
        "global-batch-size": 4,
    }


def as_arguments(flags: Flags) -> list[str]:
    """``--name=value``; True is a flag without a value, None no flag, a list several values."""
    arguments = []
    for name, value in flags.items():
        if value is True:
            arguments.append(f"--{name}")
        elif isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        elif value is not None:
            arguments.append(f"--{name}={value}")
    return arguments


def run(
    arguments: list[str],
    timeout: float = 120.0,
    command: Sequence[str] = (sys.executable, "pretrain_attnres.py"),
    **environment: str,
) -> Finished:
    """Run the command; it and its ranks are killed if it takes longer than ``timeout`` seconds."""
    inherited = {name: v for name, v in os.environ.items() if name not in HIDDEN_VARIABLES}
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return Finished(process.returncode, stdout, stderr)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its content; None for folders."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
