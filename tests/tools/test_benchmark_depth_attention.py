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
    sizes = ["--hidden-size=128", "--tokens=64", "--sources", "2", "5", "--sublayers=3"]
    answer = benchmark(*sizes, "--parts=operator", "--rounds=3", "--threads=1", "--json")
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
        source_bytes = 64 * 128 * (4 if row["dtype"] == "float32" else 2)
        assert row["extra_bytes"] < row["naive_extra_bytes"]
        # The pseudo-code keeps at least two stacks of all sources.
        assert row["naive_extra_bytes"] > 2 * row["sources"] * source_bytes


def test_a_model_s_steps_are_timed_against_standard_residuals():
    sizes = ["--model-size=tiny", "--num-blocks=4", "--vocab-size=128", "--tokens=32"]
    parts = ["--parts", "training-step", "memory", "decode-step", "--context=16"]
    answer = benchmark(*sizes, *parts, "--precision=fp32", "--rounds=2", "--threads=1", "--json")
    assert answer.returncode == 0, answer.stderr
    (row,) = json.loads(answer.stdout)
    assert row["training_step"].keys() >= {"baseline_ms", "ours_ms", "naive_ms", "ratio"}
    assert row["decode_step"].keys() >= {"baseline_ms", "ours_ms", "ratio"}
    assert row["memory"].keys() == {"baseline_bytes", "ours_bytes", "ratio"}
    for part in row.values():
        if isinstance(part, dict):
            assert all(value > 0 for value in part.values())


def test_bad_sizes_are_one_line():
    answer = benchmark("--hidden-size=100")
    assert answer.returncode == 2
    assert answer.stderr.splitlines() == [
        "benchmark_depth_attention.py: --hidden-size 100: must be a multiple of 64"
    ]


def test_more_blocks_than_sublayers_are_refused():
    answer = benchmark("--model-size=tiny", "--num-blocks=17")
    assert answer.returncode == 2
    assert answer.stderr.splitlines() == [
        "benchmark_depth_attention.py: --num-blocks 17: --model-size tiny has 16 sublayers"
    ]
