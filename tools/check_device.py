"""Checks on a CUDA host what cannot be run without one; under three minutes.

python tools/check_device.py            on one GPU: kernels, optimizer, memory
                                        on two or more: the NCCL lanes too

Trains the same small model for a few iterations in several ways, as real runs of
pretrain_attnres.py, and compares their losses with those of a CPU run:

- one rank on CUDA in fp32 and bf16 (attention kernels, Apex's FusedAdam where it is built);
- ZeRO with optimizer state in host memory;
- with two GPUs or more P = 2, V = 2 under NCCL: both policies, early relay on and off, with and
  without overlapped p2p. These run the lanes' warm-up, their streams and their waits; the bytes
  sent are held against the plan.

``--cpu`` runs the same commands over gloo, to check this script where there is no GPU.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.commands import CommandParser, run_command
from megatron_attnres.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
ITERATIONS = 8
PIPELINE = {"pipeline-model-parallel-size": 2, "virtual-pipeline-model-parallel-size": 2}
Flags = dict[str, object]


@dataclass(frozen=True)
class Check:
    """One run and how close its losses must be to the CPU's."""

    name: str
    flags: Flags
    ranks: int = 1
    tolerance: float = 1e-4


def checks(num_devices: int, on_cpu: bool) -> list[Check]:
    """What this host can check."""
    found = [
        Check("fp32", {}),
        Check("bf16", {"precision": "bf16"}, tolerance=2e-2),
        Check("full recomputation", {"recompute-granularity": "full"}),
    ]
    if not on_cpu:
        found.append(Check("optimizer state in host memory", {"zero-cpu-offload": True}))
    if num_devices < 2:
        return found
    for policy in ("naive", "cached"):
        for relay in ("attn-res-early-relay", "no-attn-res-early-relay"):
            for overlap in ("overlap-p2p-communication", "no-overlap-p2p-communication"):
                name = f"P = 2, V = 2, {policy}, {relay}, {overlap}"
                flags = PIPELINE | {"attn-res-pipeline": policy, relay: True, overlap: True}
                found.append(Check(name, flags, ranks=2))
    return found


def train(folder: Path, flags: Flags, ranks: int, hide_devices: bool) -> list[dict]:
    """Metrics of a real run.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    every = _model_flags(folder) | flags | {"metrics-file": metrics, "nproc-per-node": ranks}
    arguments = [f"--{n}" if value is True else f"--{n}={value}" for n, value in every.items()]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if hide_devices else {})
    finished = subprocess.run(
        [sys.executable, "pretrain_attnres.py", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if finished.returncode != 0:
        raise RuntimeError(finished.stderr[-4000:])
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def main(args: Sequence[str]) -> None:
    """Run the checks and print a line for each.

    Raises:
        InputError: no GPU, or a check failed.
    """
    parser = CommandParser("Check on a CUDA host what cannot be run without one.")
    parser.add_argument("--cpu", action="store_true", help="run over gloo, to check the script")
    on_cpu = parser.parse_args(args).cpu
    num_devices = 2 if on_cpu else _devices()
    failed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_corpus(folder)
        reference = _losses(train(folder, {}, ranks=1, hide_devices=True))
        for check in checks(num_devices, on_cpu):
            start = time.monotonic()
            verdict = _verdict(folder, check, reference, on_cpu)
            print(f"{verdict:<50}{time.monotonic() - start:5.0f} s  {check.name}", flush=True)
            if not verdict.startswith("ok"):
                failed.append(check.name)
    if failed:
        raise InputError(f"{len(failed)} checks failed: {'; '.join(failed)}")


def _verdict(folder: Path, check: Check, reference: list[float], on_cpu: bool) -> str:
    try:
        metrics = train(folder, check.flags, check.ranks, hide_devices=on_cpu)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return "FAILED to run, see above"
    worst = max(
        abs(one - other) / other for one, other in zip(_losses(metrics), reference, strict=True)
    )
    if worst > check.tolerance:
        return f"FAILED losses differ by {worst:.1e}"
    planned = _planned_bytes(check)
    sent = metrics[-1]["p2p_bytes_forward"]
    if sent != planned:
        return f"FAILED {sent} bytes sent, {planned} planned"
    return f"ok  losses within {worst:.1e}"


def _planned_bytes(check: Check) -> int:
    from megatron_attnres.pipeline.plan import PipelinePlan, even_layers, total_entries

    if check.ranks == 1:
        return 0
    plan = PipelinePlan(even_layers(4, 4), 2, 3, check.flags["attn-res-pipeline"])
    return total_entries(plan.hops) * 8 * 64 * 64 * 4


def _model_flags(folder: Path) -> Flags:
    return {
        "num-layers": 4,
        "hidden-size": 64,
        "ffn-hidden-size": 128,
        "num-attention-heads": 4,
        "num-query-groups": 2,
        "seq-length": 64,
        "attn-res-block-size": 3,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": 255,
        "data-path": folder / "corpus_text_document",
        "split": "100,0,0",
        "train-iters": ITERATIONS,
        "micro-batch-size": 2,
        "global-batch-size": 8,
        "lr": 1e-3,
    }


def _make_corpus(folder: Path) -> None:
    from megatron_attnres.data.configuration import TokenizerConfig
    from megatron_attnres.data.corpora import Corpus
    from megatron_attnres.data.preprocess import preprocess

    text = " ".join(str((index * index) % 255) for index in range(20_000))
    (folder / "ids.txt").write_text(text)
    tokenizer = TokenizerConfig("NullTokenizer", vocab_size=255)
    preprocess(Corpus([folder / "ids.txt"]), tokenizer, str(folder / "corpus"))


def _losses(metrics: list[dict]) -> list[float]:
    return [line["lm_loss"] for line in metrics]


def _devices() -> int:
    import torch

    if not torch.cuda.is_available():
        raise InputError("no CUDA device was found; run this on a GPU host, or with --cpu")
    return torch.cuda.device_count()


if __name__ == "__main__":
    run_command(main)
