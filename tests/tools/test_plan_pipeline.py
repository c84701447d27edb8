"""The planner's command: the numbers of a layout, at once and without torch."""

import json
import subprocess
import sys

import pytest

from megatron_attnres.errors import InputError
from tests.tools.simulator_flags import RIGHT, ROOT, tool, typed

LAYOUT = [
    "--num-layers=8",
    "--attn-res-block-size=4",
    "--pipeline-model-parallel-size=4",
    "--virtual-pipeline-model-parallel-size=2",
]
COUNTS = ("naive", "cached", "critical", "relayed")


def plan(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "tools/plan_pipeline.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_json_holds_hops_and_totals():
    report = json.loads(plan(*LAYOUT, "--json").stdout)
    assert [tuple(hop[name] for name in COUNTS) for hop in report["hops"]] == [
        (2, 2, 2, 0),
        (2, 2, 1, 1),
        (3, 3, 1, 2),
        (3, 2, 1, 1),
        (4, 2, 1, 1),
        (4, 2, 1, 1),
        (5, 2, 1, 1),
    ]
    assert [(hop["from"], hop["to"]) for hop in report["hops"]] == [(c, c + 1) for c in range(7)]
    assert [hop["partial"] for hop in report["hops"]] == [True, False] * 3 + [True]
    assert report["totals"] == {
        "naive": 23,
        "cached": 15,
        "critical": 8,
        "relayed": 7,
        "lower_bound": 15,
        "standard_residual": 7,
        "paper_eq7": 14.0,
        "paper_eq8": 11.0,
    }


def test_sizes_give_bytes():
    sizes = ["--seq-length=64", "--micro-batch-size=2", "--hidden-size=8", "--json"]
    shards = ["--tensor-model-parallel-size=4", "--sequence-parallel"]
    whole = json.loads(plan(*LAYOUT, *sizes).stdout)
    assert whole["entry_bytes"] == 64 * 2 * 8 * 2
    assert whole["total_bytes"] == {
        "naive": 23 * whole["entry_bytes"],
        "cached": 15 * whole["entry_bytes"],
    }
    assert whole["hops"][6]["naive_bytes"] == 5 * whole["entry_bytes"]
    sharded = json.loads(plan(*LAYOUT, *sizes, *shards).stdout)
    assert sharded["entry_bytes"] * 4 == whole["entry_bytes"]
    wide = json.loads(plan(*LAYOUT, *sizes, "--precision=fp32").stdout)
    assert wide["entry_bytes"] == 2 * whole["entry_bytes"]


def test_the_table_names_every_chunk_and_hop():
    text = plan(*LAYOUT).stdout
    assert all(f"  {hop}-{hop + 1} " in text for hop in range(7))
    assert "least possible" in text
    assert "15 entries" in text


def test_uneven_chunks_and_the_baseline_are_planned():
    uneven = plan(
        "--num-layers=8",
        "--attn-res-block-size=4",
        "--pipeline-model-parallel-size=4",
        "--pipeline-layers-per-chunk",
        *"0440",
        "--json",
    )
    assert [hop["naive"] for hop in json.loads(uneven.stdout)["hops"]] == [1, 3, 5]
    baseline = plan(
        "--num-layers=8", "--attn-res-mode=baseline", "--pipeline-model-parallel-size=4", "--json"
    )
    totals = json.loads(baseline.stdout)["totals"]
    assert totals["naive"] == totals["cached"] == totals["standard_residual"] == 3
    assert totals["paper_eq7"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-layers=7", *LAYOUT[1:]], ["--num-layers 7", "divisible", "= 8"]),
        ([*LAYOUT, "--attn-res-block-size=17"], ["--attn-res-block-size 17", "1 to", "16"]),
        ([*LAYOUT, "--attn-res-num-blocks=2"], ["--attn-res-num-blocks 2", "one of the two"]),
        ([*LAYOUT, "--seq-length=8"], ["--micro-batch-size", "--hidden-size", "missing"]),
        ([LAYOUT[0], "--virtual-pipeline-model-parallel-size=2"], ["needs", "which is 1"]),
        ([*LAYOUT, "--pipeline-layers-per-chunk", "4", "4"], ["4 4", "2 chunks", "= 8"]),
        ([*LAYOUT, "--pipeline-layers-per-chunk", *"11011211"], ["every chunk but the first"]),
        ([*LAYOUT, "--pipeline-layers-per-chunk", *"11111112"], ["9 layers", "is 8"]),
    ],
)
def test_bad_layouts_are_one_line(arguments, words):
    answer = plan(*arguments)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert len(answer.stderr.splitlines()) == 1
    assert all(word in answer.stderr for word in words), answer.stderr


SUGGEST = RIGHT | {"suggest": True, "memory-per-rank": 0.001}


def test_virtual_stages_and_blocks_are_ranked_by_step_time():
    report = json.loads(plan(*typed(SUGGEST), "--json").stdout)
    suggestions = report["suggestions"]
    assert {(one["virtual_size"], one["num_blocks"], one["block_size"]) for one in suggestions} == {
        (virtual, blocks, 16 // blocks) for virtual in (1, 2) for blocks in (2, 4, 8, 16)
    }
    ranks = [(not one["fits"], one["step_seconds"]) for one in suggestions]
    assert ranks == sorted(ranks)
    for one in suggestions:
        assert one["fits"] == (one["summary_bytes"] <= 0.001 * 2**30)
        assert one["overhead"] > 0
    assert {one["fits"] for one in suggestions} == {True, False}
    assert report["assumptions"]["share_link"]["origin"] == "default"


def test_a_suggestion_is_the_simulators_step(capsys):
    cell = {"attn-res-num-blocks": 4, "virtual-pipeline-model-parallel-size": 2}
    tool("simulate_pipeline")(typed(RIGHT | cell | {"json": True}))
    cached = json.loads(capsys.readouterr().out)["policies"][4]
    tool("plan_pipeline")(typed(SUGGEST | {"json": True}))
    for one in json.loads(capsys.readouterr().out)["suggestions"]:
        if (one["virtual_size"], one["num_blocks"]) == (2, 4):
            assert one["step_seconds"] == cached["step_seconds"]
            assert one["overhead"] == cached["overhead"]
            assert one["summary_bytes"] == cached["peak_summary_bytes"]


def test_suggestions_are_a_table_for_people(capsys):
    tool("plan_pipeline")(typed(SUGGEST))
    text = capsys.readouterr().out
    assert "latency between nodes" in text
    assert "summaries  fits" in text
    assert text.count("  yes\n") + text.count("  no\n") == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"suggest": None}, ["--memory-per-rank 0.001", "--suggest"]),
        ({"suggest": None, "memory-per-rank": None}, ["--num-microbatches 8", "--suggest"]),
        ({"memory-per-rank": None}, ["--memory-per-rank is missing"]),
        ({"memory-per-rank": 0}, ["--memory-per-rank", "above 0"]),
        ({"attn-res-num-blocks": 4}, ["--attn-res-num-blocks 4", "--suggest chooses"]),
        ({"virtual-pipeline-model-parallel-size": 2}, ["size 2", "--suggest chooses"]),
        ({"pipeline-layers-per-chunk": [2, 2, 2, 2]}, ["chunk 2 2 2 2", "--suggest chooses"]),
        ({"attn-res-mode": "full"}, ["--attn-res-mode full", "--suggest chooses"]),
        ({"num-layers": 6}, ["--num-layers 6", "divisible"]),
        ({"bandwidth-between-nodes": "nan"}, ["--bandwidth-between-nodes", "finite"]),
    ],
)
def test_bad_suggestions_are_one_line(change, words):
    with pytest.raises(InputError) as caught:
        tool("plan_pipeline")(typed(SUGGEST | change))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert all(word in message for word in words), message


def test_it_loads_no_torch():
    code = (
        "import runpy, sys; sys.argv = ['plan_pipeline.py', *sys.argv[1:]]\n"
        "try: runpy.run_path('tools/plan_pipeline.py', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, *LAYOUT, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.stdout.splitlines()[-1] == "False"
