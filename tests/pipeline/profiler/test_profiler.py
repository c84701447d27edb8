"""Real ranks under the profiler: it sees all of the plan, all of the time, and disturbs nothing."""

import os
import time

import pytest
import torch
from torch import distributed

from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.pipeline.profiler.alignment import ROUND_TRIPS, read_clocks
from megatron_attnres.pipeline.profiler.profiler import PipelineProfiler
from megatron_attnres.pipeline.timeline.chrome_trace import chrome_trace
from megatron_attnres.pipeline.timeline.parts import stage_parts
from megatron_attnres.pipeline.timeline.records import stage_of
from megatron_attnres.pipeline.timeline.report import timelines_report
from megatron_attnres.training.build import make_plan
from tests.distributed import GROUP_TIMEOUT, RankError, run_ranks
from tests.layouts import (
    Case,
    build,
    full_gradients,
    relative_error,
    run_step,
    small_model,
    timeline_layout,
)

CASES = [
    Case(small_model(8), ParallelLayout(pipeline=4, virtual_pipeline=2), recompute="full"),
    Case(small_model(8, block_size=3), ParallelLayout(pipeline=4), early_relay=False),
    Case(small_model(8), ParallelLayout(pipeline=2, virtual_pipeline=2, data=2), policy="naive"),
    Case(
        small_model(4, mode="full"),
        ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2, sequence_parallel=True),
    ),
]


def profiled(case):
    """Gradients without and with the profiler, what it saw, and each rank's own stopwatch."""
    groups, step = build(case, torch.float64)
    run_step(case, groups, step)
    plain = full_gradients(groups, step)
    profiler = PipelineProfiler(
        step, timeline_layout(case, torch.float64), torch.device("cpu"), GROUP_TIMEOUT
    )
    profiler.begin()
    stopwatch = []
    for iteration in (1, 2):
        for chunk in step.chunks:
            chunk.zero_grad()
        distributed.barrier()
        with profiler.step(iteration):
            start = time.perf_counter()
            run_step(case, groups, step)
            stopwatch.append(time.perf_counter() - start)
    watched = full_gradients(groups, step)
    timelines = profiler.end()
    hooks = [len(chunk._forward_hooks) + len(chunk._forward_pre_hooks) for chunk in step.chunks]
    assert hooks == [0] * len(hooks), "the profiler has let go"
    error = max(relative_error(watched[name], plain[name]) for name in plain)
    return timelines, stopwatch, error


@pytest.fixture(scope="module", params=CASES, ids=lambda case: str(case.layout)[15:-1])
def run(request):
    case = request.param
    answers = run_ranks(profiled, case.layout.world_size, case)
    return case, answers[0][0], [answer[1] for answer in answers], max(a[2] for a in answers)


def test_every_pipeline_and_step_is_there(run):
    case, timelines, _, _ = run
    pipelines = case.layout.world_size // case.layout.pipeline
    assert [step.iteration for step in timelines.steps] == [1] * pipelines + [2] * pipelines
    for steps in (timelines.steps[:pipelines], timelines.steps[pipelines:]):
        ranks = sorted(rank for step in steps for rank in step.ranks)
        assert ranks == list(range(case.layout.world_size))


def test_profiled_bytes_are_the_plans(run):
    _, timelines, _, _ = run
    report = timelines_report(timelines)
    assert report["bytes_as_planned"]
    assert sum(hop["num_bytes"] for step in report["steps"] for hop in step["hops"]) > 0


def test_every_chunk_computes_every_microbatch_once_each_way(run):
    case, timelines, _, _ = run
    expected = sorted(
        (direction, chunk, microbatch)
        for direction in ("backward", "forward")
        for chunk in range(case.layout.num_chunks)
        for microbatch in range(case.num_microbatches)
    )
    for step in timelines.steps:
        assert sorted(span[1:4] for span in step.computes) == expected
        for span in step.computes:
            assert span.stage == span.chunk % case.layout.pipeline


def test_the_parts_make_up_the_time_that_a_stopwatch_sees(run):
    case, timelines, stopwatches, _ = run
    for step in timelines.steps:
        for parts in stage_parts(step, case.layout.pipeline):
            total = parts.compute + parts.bubble + parts.exposed + parts.host + parts.idle
            assert total == pytest.approx(parts.seconds, rel=1e-6)
            own = stopwatches[parts.rank][step.iteration - 1]
            assert total - parts.idle == pytest.approx(own, rel=0.01, abs=1e-3)


def test_causes_come_before_effects(run):
    case, timelines, _, _ = run
    slack = timelines.clock_error
    size = case.layout.pipeline
    for step in timelines.steps:
        ends = {span[1:4]: span.end for span in step.computes}
        starts = {span[1:4]: span.start for span in step.computes}
        for transfer in step.transfers:
            direction, hop, microbatch = transfer.message
            up, down = ("forward", hop, microbatch), ("backward", hop + 1, microbatch)
            source = up if direction == "forward" else down
            if transfer.kind == "critical":
                assert transfer.send_posted >= ends[source] - slack
            assert transfer.send_posted >= starts[source] - slack
            assert transfer.started <= transfer.completed
        for wait in step.waits:
            assert wait.stage == stage_of(wait.message, wait.side, size)


# The paper's figure 3: P = 4, V = 2, blocks of two chunks; what each hop carries.
FIGURE_3 = {
    0: "b0 partial",
    1: "b0 b1",
    2: "b0 b1 partial",
    3: "b1 b2",
    4: "b2 partial",
    5: "b2 b3",
    6: "b3 partial",
}


@pytest.mark.parametrize("run", CASES[:1], indirect=True, ids=["P 4, V 2, S 4"])
def test_the_trace_of_the_papers_figure_3(run):
    case, timelines, _, _ = run
    carried = {hop: len(entries.split()) for hop, entries in FIGURE_3.items()}
    plan = make_plan(case.model, case.layout, "cached")
    for hop in plan.hops:
        names = [f"b{source}" for source in hop.sources] + ["partial"] * hop.partial
        assert " ".join(names) == FIGURE_3[hop.index]
    entries = dict.fromkeys(carried, 0)
    for event in chrome_trace(timelines)["traceEvents"]:
        if "transfer,critical,forward,send" in event.get("cat", "") or (
            "transfer,relay,forward,send" in event.get("cat", "")
        ):
            hop = int(event["name"].split()[2].split("-")[0])
            entries[hop] += event["args"]["bytes"] / timelines.layout.entry_bytes
    steps_and_microbatches = len(timelines.steps) * case.num_microbatches
    assert entries == {hop: count * steps_and_microbatches for hop, count in carried.items()}


def test_gradients_are_the_same(run):
    # Data-parallel sums and all else run as before; the profiler only looks on.
    assert run[3] == 0.0


def skewed_clocks():
    """Every rank's clock is wrong by its own second."""
    rank = distributed.get_rank()
    reading = read_clocks(distributed.group.WORLD, lambda: time.perf_counter() + 10.0 * rank)
    return reading.offset, reading.error


def test_clocks_that_are_seconds_apart_are_brought_together():
    assert ROUND_TRIPS > 1
    for rank, (offset, error) in enumerate(run_ranks(skewed_clocks, 3)):
        assert offset == pytest.approx(-10.0 * rank, abs=error + 1e-6)
        assert error < 0.1


def loses_a_peer(case):
    """Rank 1 dies when the profiled step begins."""
    groups, step = build(case, torch.float64)
    profiler = PipelineProfiler(
        step, timeline_layout(case, torch.float64), torch.device("cpu"), GROUP_TIMEOUT
    )
    profiler.begin()
    if distributed.get_rank() == 1:
        os._exit(1)
    with profiler.step(1):
        run_step(case, groups, step)


def test_a_lost_peer_is_named_as_without_the_profiler():
    case = Case(small_model(4), ParallelLayout(pipeline=2))
    with pytest.raises(RankError, match=r"critical lane: (send to|receive from) rank 1 failed"):
        run_ranks(loses_a_peer, 2, case)
