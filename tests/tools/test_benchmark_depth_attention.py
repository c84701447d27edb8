"""The benchmark's command: every figure is there and means what it says."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FIGURES = {
    "hidden",
    "tokens",
    "sources",
    "dtype",
    "naive_ms",
    "ours_ms",
    "layer_ms",
    "speedup",
    "share_of_layer",
    "extra_bytes",
}


def benchmark(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "tools/benchmark_depth_attention.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_json_holds_a_row_per_case():
    sizes = ["--hidden-size=128", "--tokens=64", "--sources", "2", "5", "--rounds=3"]
    answer = benchmark(*sizes, "--threads=1", "--json")
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(answer.stdout)
    assert [(row["sources"], row["dtype"]) for row in rows] == [
        (2, "float32"),
        (5, "float32"),
        (2, "bfloat16"),
        (5, "bfloat16"),
    ]
    for row in rows:
        assert row.keys() >= FIGURES
        assert all(row[name] > 0 for name in FIGURES - {"dtype"})
        # The result, three scalars per source and token, and no stack of sources.
        element = 4 if row["dtype"] == "float32" else 2
        assert row["extra_bytes"] <= 64 * 128 * element + 3 * row["sources"] * 64 * 4 + 1024
        assert row["speedup"] > 1


def test_bad_sizes_are_one_line():
    answer = benchmark("--hidden-size=100")
    assert answer.returncode == 2
    assert answer.stderr.splitlines() == [
        "benchmark_depth_attention.py: --hidden-size 100: must be a multiple of 64"
    ]
