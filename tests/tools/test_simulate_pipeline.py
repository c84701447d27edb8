"""The simulator's command: its report, its files, and input that is wrong."""

import json
import re
import signal
import subprocess
import sys

import pytest

from megatron_attnres.errors import InputError
from tests.tools.simulator_flags import CLUSTER, FLOPS, MODEL, RIGHT, ROOT, TIMES, tool, typed

V2 = {"virtual-pipeline-model-parallel-size": 2}
PROFILE = {"compute-from": "FILE", **CLUSTER}


@pytest.fixture(scope="module")
def main():
    return tool("simulate_pipeline")


def run(*words):
    return subprocess.run(
        [sys.executable, "tools/simulate_pipeline.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def report_of(main, capsys, flags):
    main(typed(flags | {"json": True}))
    return json.loads(capsys.readouterr().out)


def test_the_command_prints_a_row_per_policy_and_what_it_assumed():
    answer = run(*typed(RIGHT))
    assert answer.returncode == 0
    assert answer.stderr == ""
    for words in ("standard residuals", "block, cached, early relay", "full, naive  "):
        assert f"\n{words}" in answer.stdout
    assert "layer backward ms                4 ms (derived)" in answer.stdout
    assert "latency between nodes            10 us (default)" in answer.stdout
    assert "share link                       yes (default)" in answer.stdout


def test_json_has_the_layout_every_policy_and_every_assumption(main, capsys):
    report = report_of(main, capsys, RIGHT | V2 | {"attn-res-block-size": 4})
    assert len(report["policies"]) == 9
    cached = report["policies"][4]
    assert (cached["mode"], cached["policy"], cached["early_relay"]) == ("block", "cached", True)
    assert cached["entries"] == 15
    assert cached["bytes_per_step"] == 2 * 15 * 8 * 128 * 2 * 64 * 2
    assert cached["step_seconds"] > 19 * 0.006
    assert report["layout"]["layers_per_chunk"] == [1] * 8
    assert report["layout"]["num_blocks"] == 4
    assumptions = report["assumptions"]
    assert assumptions["layer_forward_ms"] == {"value": 2.0, "unit": "ms", "origin": "given"}
    assert assumptions["ranks_per_node"] == {"value": 8, "unit": "ranks", "origin": "default"}
    assert assumptions["entry_bytes"]["value"] == 128 * 2 * 64 * 2
    assert {"depth_attention_share", "share_link", "overlap_p2p_communication"} < set(assumptions)


def test_a_rate_and_sizes_give_times(main, capsys):
    flags = MODEL | FLOPS | CLUSTER | {"attn-res-mode": "block", "padded-vocab-size": 256}
    report = report_of(main, capsys, flags)
    tokens, hidden = 256, 64
    layer = 2 * tokens * hidden * (4 * hidden + 3 * 128) + 4 * tokens * 128 * hidden
    assumptions = report["assumptions"]
    assert assumptions["layer_forward_ms"]["value"] == pytest.approx(layer / 0.5e12 * 1e3)
    assert assumptions["head_forward_ms"]["value"] == pytest.approx(
        2 * tokens * hidden * 256 / 0.5e12 * 1e3
    )
    again = report_of(main, capsys, flags | {"recompute-granularity": "full"})
    ratio = (
        again["assumptions"]["layer_backward_ms"]["value"]
        / (assumptions["layer_forward_ms"]["value"])
    )
    assert ratio == pytest.approx(3)
    assert len(report["policies"]) == 5


def test_tensor_parallel_ranks_share_a_layer_and_its_sequence(main, capsys):
    flags = MODEL | FLOPS | CLUSTER
    whole = report_of(main, capsys, flags)["assumptions"]
    shared = {"tensor-model-parallel-size": 4, "sequence-parallel": True}
    sharded = report_of(main, capsys, flags | shared)["assumptions"]
    for name in ("layer_forward_ms", "entry_bytes"):
        assert sharded[name]["value"] == pytest.approx(whole[name]["value"] / 4)


def test_nodes_decide_which_link_is_taken(main, capsys):
    def stages_together(flags):
        report = report_of(main, capsys, RIGHT | flags)
        together = report["assumptions"]["neighbouring_stages_on_one_node"]["value"]
        return together, report["policies"][1]["step_seconds"]

    (one_node, fast), (apart, slow) = stages_together({}), stages_together({"ranks-per-node": 1})
    assert (one_node, apart) == (3, 0)
    assert fast < slow
    assert stages_together({"data-parallel-size": 8}) == (0, slow)


def test_a_yaml_file_says_the_same(main, capsys, tmp_path):
    keys = {name.replace("-", "_"): value for name, value in RIGHT.items()}
    path = tmp_path / "cluster.yaml"
    lines = [f"{name}: {value}" for name, value in keys.items()]
    path.write_text("\n".join([*lines, "share_link: false", "sweep_num_blocks: [2, 4]"]))
    from_file = report_of(main, capsys, {"config": path})
    assert from_file == report_of(
        main, capsys, RIGHT | {"no-share-link": True, "sweep-num-blocks": [2, 4]}
    )


def test_a_sweep_is_printed_and_drawn(main, capsys, tmp_path):
    sweep = {"sweep-num-blocks": [2, 4], "sweep-virtual": [1, 2]}
    plot = {"plot": tmp_path / "new" / "sweep.png"}
    report = report_of(main, capsys, RIGHT | sweep | plot)
    assert (tmp_path / "new" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert {(one["virtual_size"], one["num_blocks"]) for one in report["sweep"]} == {
        (virtual, blocks) for virtual in (1, 2) for blocks in (2, 4)
    }
    main(typed(RIGHT | sweep))
    assert re.search(r"\n +2 +4 +4 +[\d.,]+", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("policy", "row"), [("standard", 0), ("naive", 1), (None, 4), ("cached-early-relay", 4)]
)
def test_a_step_is_drawn_and_traced(main, capsys, tmp_path, policy, row):
    files = {"timeline": tmp_path / "step.png", "trace": tmp_path / "step.json", "policy": policy}
    report = report_of(main, capsys, RIGHT | V2 | files)
    assert files["timeline"].read_bytes().startswith(b"\x89PNG")
    events = json.loads(files["trace"].read_text())["traceEvents"]
    ends = [event["ts"] + event.get("dur", 0) for event in events if "ts" in event]
    assert max(ends) == pytest.approx(report["policies"][row]["step_seconds"] * 1e6, rel=1e-6)


def test_a_prediction_read_back_as_a_profile_predicts_itself(main, capsys, tmp_path):
    """A measured timeline gives layout and times; here the measured one is a prediction."""
    flags = RIGHT | V2 | {"attn-res-num-blocks": 4, "depth-attention-share": 0.1}
    path = write_profile(tmp_path, flags)
    expected = report_of(main, capsys, flags)
    measured = {"compute-from": path, "depth-attention-share": 0.1, **CLUSTER}
    found = report_of(main, capsys, measured)
    for one, other in zip(found["policies"], expected["policies"], strict=True):
        assert one["step_seconds"] == pytest.approx(other["step_seconds"], rel=1e-9)
        assert one["bytes_per_step"] == other["bytes_per_step"]
        assert one["tokens_per_second"] is None
    assert found["assumptions"]["compute_times"]["origin"] == "profile"
    assert found["layout"]["block_size"] == 4


def write_profile(folder, flags):
    """The predicted step of cached with early relay, in the profiler's format."""
    from megatron_attnres.analysis.predictions.description import scenario_of
    from megatron_attnres.analysis.predictions.megatron_core import load_schedules

    load_schedules()
    from megatron_attnres.analysis.predictions.timeline_output import predicted_timelines
    from megatron_attnres.pipeline.simulator.workload import Payload
    from megatron_attnres.pipeline.timeline.timeline_file import write_timelines

    parser = tool_parser()
    scenario = scenario_of(parser.parse_args(typed(flags)))
    path = folder / "timelines.json"
    write_timelines(
        path, predicted_timelines(scenario, Payload(scenario.block_size, "cached", True))
    )
    return path


def test_a_profile_without_any_time_is_refused(main, tmp_path):
    from megatron_attnres.pipeline.timeline.records import (
        ComputeSpan,
        StageSpan,
        StepTimeline,
        TimelineLayout,
        Timelines,
    )
    from megatron_attnres.pipeline.timeline.timeline_file import write_timelines

    computes = tuple(
        ComputeSpan(stage, direction, stage, 0, 0.0, 0.0)
        for stage in (0, 1)
        for direction in ("forward", "backward")
    )
    step = StepTimeline(1, (0, 1), (StageSpan(0.0, 0.0),) * 2, computes, (), ())
    layout = TimelineLayout((1, 1), 2, 1, "cached", True, 1, 2, True, 1)
    path = tmp_path / "zero.json"
    write_timelines(path, Timelines(layout, (step,)))
    with pytest.raises(InputError, match=r"zero\.json: no computation took any time"):
        main(typed({"compute-from": path, **CLUSTER}))


def tool_parser():
    import runpy

    return runpy.run_path(str(ROOT / "tools" / "simulate_pipeline.py"))["_parser"]()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bandwidth-between-nodes": 0}, ["--bandwidth-between-nodes", "'0'", "above 0"]),
        ({"bandwidth-between-nodes": "nan"}, ["--bandwidth-between-nodes", "'nan'", "finite"]),
        ({"bandwidth-inside-node": "inf"}, ["--bandwidth-inside-node", "'inf'", "finite"]),
        ({"bandwidth-inside-node": None}, ["--bandwidth-inside-node is missing", "GB/s"]),
        ({"bandwidth-inside-node": "fast"}, ["--bandwidth-inside-node", "'fast'"]),
        ({"latency-between-nodes": "-1"}, ["--latency-between-nodes", "'-1'", "at least 0"]),
        ({"latency-inside-node": "nan"}, ["--latency-inside-node", "'nan'"]),
        ({"ranks-per-node": 0}, ["--ranks-per-node", "at least 1"]),
        ({"num-microbatches": 10**8}, ["--num-microbatches 100000000", "at most 20,000,000"]),
        ({"hidden-size": 10**400}, ["--hidden-size", "at most 1,000,000,000,000"]),
        ({"num-layers": 10**9}, ["--num-layers", "at most 100,000"]),
        ({"timeline": "a" * 300}, ["--timeline aaa", "File name too long"]),
        ({"timeline": "x.png", "trace": "x.png"}, ["--trace x.png", "another one"]),
        ({"depth-attention-share": "-0.1"}, ["--depth-attention-share", "at least 0"]),
        ({"num-layers": None}, ["--num-layers is missing"]),
        ({"num-layers": 6}, ["--num-layers 6", "divisible by", "= 4"]),
        ({"num-layers": 2}, ["--num-layers 2", "divisible by", "= 4"]),
        (
            {"pipeline-model-parallel-size": 1},
            ["--pipeline-model-parallel-size 1", "single stage", "2 or more"],
        ),
        ({"pipeline-model-parallel-size": None}, ["--pipeline-model-parallel-size 1"]),
        (
            {"pipeline-layers-per-chunk": [0, 4, 0, 4]},
            ["--pipeline-layers-per-chunk 0 4 0 4", "needs a layer"],
        ),
        ({"num-microbatches": None}, ["--num-microbatches is missing"]),
        (V2 | {"num-microbatches": 3}, ["--num-microbatches 3", "at least 4"]),
        (V2 | {"num-microbatches": 6}, ["--num-microbatches 6", "multiple of 4"]),
        (
            V2 | {"microbatch-group-size-per-virtual-pipeline-stage": 3},
            ["--microbatch-group-size-per-virtual-pipeline-stage 3", "4 (stages) to 8"],
        ),
        ({"seq-length": None}, ["--seq-length is missing"]),
        ({"hidden-size": None}, ["--hidden-size is missing"]),
        ({"layer-forward-ms": None}, ["--layer-forward-ms", "--tflops-per-rank", "missing"]),
        (FLOPS, ["--layer-forward-ms 2", "--tflops-per-rank 0.5", "one of the two"]),
        ({"ffn-hidden-size": 4}, ["--ffn-hidden-size 4", "leave it out"]),
        (
            {"recompute-granularity": "selective"},
            ["--recompute-granularity selective", "--layer-backward-ms"],
        ),
        (
            {"layer-backward-ms": 3, "recompute-granularity": "full"},
            ["--recompute-granularity full", "one of the two"],
        ),
        ({"layer-forward-ms": None, "layer-backward-ms": 3}, ["--layer-forward-ms"]),
        (
            FLOPS | {"layer-forward-ms": None, "layer-backward-ms": 3},
            ["--layer-backward-ms 3", "needs --layer-forward-ms"],
        ),
        (
            FLOPS | {"layer-forward-ms": None, "num-attention-heads": None},
            ["--num-attention-heads is missing"],
        ),
        (
            FLOPS | {"layer-forward-ms": None, "num-query-groups": 3},
            ["--num-query-groups 3", "must divide", "4"],
        ),
        (
            FLOPS | {"layer-forward-ms": None, "num-attention-heads": 5},
            ["--hidden-size 64", "--num-attention-heads 5"],
        ),
        (
            FLOPS | {"layer-forward-ms": None, "tensor-model-parallel-size": 8},
            ["--num-attention-heads 4", "--tensor-model-parallel-size 8"],
        ),
        ({"sequence-parallel": True}, ["--sequence-parallel", "2 or more"]),
        (
            {"sequence-parallel": True, "tensor-model-parallel-size": 3},
            ["--seq-length 128", "--tensor-model-parallel-size 3"],
        ),
        ({"attn-res-num-blocks": 7}, ["--attn-res-num-blocks 7", "cannot be cut"]),
        (
            {"attn-res-num-blocks": 4, "attn-res-block-size": 4},
            ["--attn-res-block-size 4", "one of the two"],
        ),
        ({"sweep-num-blocks": [4, 7]}, ["--sweep-num-blocks 7", "cannot be cut"]),
        ({"sweep-num-blocks": [17]}, ["--sweep-num-blocks 17", "1 to", "16"]),
        ({"sweep-virtual": [3]}, ["--sweep-virtual 3", "divisible"]),
        ({"sweep-virtual": [2], "num-microbatches": 3}, ["--sweep-virtual 2", "at least 4"]),
        (
            {"sweep-virtual": [2], "pipeline-layers-per-chunk": [1, 2, 2, 3]},
            ["--sweep-virtual 2", "--pipeline-layers-per-chunk"],
        ),
        ({"plot": "sweep.png"}, ["--plot sweep.png", "--sweep-num-blocks"]),
        ({"policy": "naive"}, ["--policy naive", "--timeline"]),
        ({"policy": "fast"}, ["--policy", "'fast'", "cached-early-relay"]),
        ({"trace": "/"}, ["--trace /", "folder"]),
        ({"timeline": "README.md/step.png"}, ["--timeline README.md/step.png", "no folder"]),
        ({"unknown": 1}, ["--unknown"]),
        (PROFILE, ["--num-layers", "--compute-from FILE", "leave it out"]),
        (dict.fromkeys(MODEL | TIMES) | PROFILE, ["FILE", "No such file"]),
    ],
)
def test_what_is_wrong_is_named_in_one_line(main, change, words):
    with pytest.raises(InputError) as caught:
        main(typed(RIGHT | change))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert all(word in message for word in words), message


def test_output_that_nobody_reads_is_no_error(tmp_path):
    """``simulate_pipeline.py ... | head -1`` ends without a traceback."""
    command = [sys.executable, str(ROOT / "tools" / "simulate_pipeline.py"), *typed(RIGHT)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.wait(timeout=60) == 128 + signal.SIGPIPE
        assert "Traceback" not in process.stderr.read()


def test_an_unknown_key_of_a_file_is_named(main, tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("bandwidth: 50\n")
    with pytest.raises(InputError, match="unknown key 'bandwidth'"):
        main(["--config", str(path)])


def test_bad_input_is_one_line_and_loads_no_torch():
    code = (
        "import runpy, sys; sys.argv = ['simulate_pipeline.py', *sys.argv[1:]]\n"
        "try: runpy.run_path('tools/simulate_pipeline.py', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    words = typed(RIGHT | {"num-layers": 6})
    answer = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout == "2 False\n"
    assert len(answer.stderr.splitlines()) == 1
    assert answer.stderr.startswith("simulate_pipeline.py: --num-layers 6: ")
