"""What a rank keeps of a micro-batch: when it enters, when it leaves, and that nothing is lost."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.pipeline.cache import BlockCache, CacheKey
from megatron_attnres.pipeline.messages import Message
from megatron_attnres.pipeline.plan import PipelinePlan
from megatron_attnres.training.build import make_plan
from tests.distributed import RankError, restart_job, run_ranks
from tests.layouts import Case, build, run_step, small_model
from tests.pipeline.orders import Layout, layouts, posting_order

KEY = CacheKey(microbatch=3, source=1)


def test_a_source_enters_once():
    cache = BlockCache()
    cache.put(KEY, torch.ones(2), chunk=0)
    with pytest.raises(RuntimeError, match=r"source 1 of micro-batch 3 enters .* a second time"):
        cache.put(KEY, torch.ones(2), chunk=2)


def test_a_source_stays_until_its_last_reader():
    cache = BlockCache()
    cache.put(KEY, torch.ones(2), chunk=0)
    for last in (False, False, True):
        assert torch.equal(cache.read(KEY, chunk=2, last=last), torch.ones(2))
    cache.check_empty()
    with pytest.raises(
        RuntimeError, match="source 1 of micro-batch 3, read by chunk 4, is not in the cache"
    ):
        cache.read(KEY, chunk=4, last=True)


def test_what_a_chunk_computed_of_a_source_stays_as_long_as_the_source():
    cache = BlockCache()
    with pytest.raises(RuntimeError, match="source 1 of micro-batch 3 is not in the cache"):
        cache.note(KEY, torch.ones(1))
    cache.put(KEY, torch.ones(2), chunk=0)
    assert cache.noted(KEY) is None
    cache.note(KEY, torch.ones(1))
    cache.read(KEY, chunk=2, last=False)
    assert torch.equal(cache.noted(KEY), torch.ones(1))
    cache.read(KEY, chunk=4, last=True)
    assert cache.noted(KEY) is None


def test_a_cached_source_has_no_graph():
    cache = BlockCache()
    cache.put(KEY, torch.ones(2, requires_grad=True) * 2, chunk=0)
    assert not cache.read(KEY, chunk=2, last=True).requires_grad


def test_deposits_add_up_and_are_collected_once():
    cache = BlockCache()
    gradients = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0])]
    for gradient in gradients:
        cache.deposit(KEY, gradient)
    assert cache.collect(KEY).item() == 7
    assert cache.collect(KEY) is None
    # What readers deposited may be in use elsewhere: it is not added to in place.
    assert [gradient.item() for gradient in gradients] == [1, 2, 4]
    cache.check_empty()


def test_what_is_left_is_named():
    cache = BlockCache()
    cache.check_empty()
    cache.put(KEY, torch.ones(2), chunk=5)
    cache.put(KEY._replace(source=2), torch.ones(2), chunk=5)
    with pytest.raises(
        RuntimeError, match=r"ended with source 1 of micro-batch 3, brought by chunk 5.*2 left"
    ):
        cache.check_empty()
    for source in (1, 2):
        cache.read(KEY._replace(source=source), chunk=7, last=True)
    cache.deposit(KEY, torch.ones(2))
    with pytest.raises(
        RuntimeError, match=r"the gradient of source 1 of micro-batch 3, brought by chunk 5.*1 left"
    ):
        cache.check_empty()


def test_the_peak_is_of_one_step():
    cache = BlockCache()
    for source in range(3):
        cache.put(KEY._replace(source=source), torch.ones(2), chunk=0)
    for source in range(3):
        cache.read(KEY._replace(source=source), chunk=2, last=True)
    assert cache.peak_entries == 3
    cache.begin_step()
    assert cache.peak_entries == 0


def walked_peak(plan: PipelinePlan, rank: int, events) -> int:
    """Most entries that a rank holds, by the order of its forwards and the plan alone."""
    kept: dict[int, set[int]] = {}
    peak = 0
    last_chunk = plan.chunks_of_rank(rank)[-1].index
    forwards = [event.message for event in events if event.what == "compute"]
    for direction, index, microbatch in forwards:
        if direction == "backward":
            continue
        chunk = plan.chunks[index]
        if index == last_chunk:
            # The last reader takes everything out; what it brings or makes it alone reads.
            kept.pop(microbatch, None)
            continue
        kept[microbatch] = {*chunk.available, *chunk.produced}
        peak = max(peak, sum(map(len, kept.values())))
    assert not kept
    return peak


def in_flight(events) -> int:
    """Most micro-batches that a rank has begun and whose last backward has not ended."""
    open_chunks: dict[int, int] = {}
    peak = 0
    for direction, _, microbatch in (e.message for e in events if e.what == "compute"):
        step = 1 if direction == "forward" else -1
        open_chunks[microbatch] = open_chunks.get(microbatch, 0) + step
        peak = max(peak, sum(count > 0 for count in open_chunks.values()))
    return peak


@settings(max_examples=200)
@given(layouts(8, 4, 24).map(lambda layout: layout._replace(policy="cached")), st.booleans())
def test_live_entries_never_exceed_microbatches_in_flight_times_sources(layout, overlap):
    plan = layout.plan()
    sources = 1 + sum(len(chunk.produced) for chunk in plan.chunks[:-1])
    for rank in range(layout.pipeline):
        events = posting_order(layout, rank, overlap=overlap, forward_only=False)
        assert walked_peak(plan, rank, events) <= in_flight(events) * sources


def orders_layout(case: Case) -> Layout:
    model, layout = case.model, case.layout
    return Layout(
        layout.pipeline,
        layout.virtual_pipeline,
        case.num_microbatches,
        layout.pipeline,
        make_plan(model, layout, case.policy).layers_per_chunk,
        model.attn_res.block_size,
        case.policy,
        case.early_relay,
    )


class CountingCache(BlockCache):
    """Knows when every source left."""

    def __init__(self):
        super().__init__()
        self.left_with = {}

    def read(self, key, chunk, last):
        source = super().read(key, chunk, last)
        if key not in self._sources:
            self.left_with[key] = chunk
        return source


def count_entries(cases: list[Case]):
    """Runs on every rank: peak by the record, and with which chunk each entry left."""
    found = []
    for case in cases:
        groups, step = build(case, torch.float32)
        cache = CountingCache()
        step = replace(step, cache=cache)
        for chunk in step.chunks:
            chunk.boundary._cache = cache
        record = run_step(case, groups, step)
        assert not cache._sources
        assert not cache._deposits
        assert record.peak_cached_entries == cache.peak_entries
        found.append((record.peak_cached_entries, cache.left_with))
        restart_job()
    return found


def test_a_real_step_holds_what_the_walk_says_and_frees_it_at_the_last_read():
    cases = [
        Case(small_model(8, block_size=4), ParallelLayout(1, 2, 4), 6, recompute="full"),
        Case(small_model(6, block_size=3), ParallelLayout(1, 2, 3), 4, overlap=False),
        Case(small_model(4, block_size=3), ParallelLayout(1, 2, 2), 4, policy="naive"),
        Case(small_model(4, block_size=3), ParallelLayout(1, 2, 1), 4),
        Case(small_model(4, mode="baseline"), ParallelLayout(1, 2, 2), 4),
    ]
    for rank, found in enumerate(run_ranks(count_entries, 2, cases)):
        for case, (peak, left_with) in zip(cases, found, strict=True):
            layout = case.layout
            plan = make_plan(case.model, layout, case.policy)
            if case.policy == "naive" or layout.virtual_pipeline == 1 or plan.block_size is None:
                assert (peak, left_with) == (0, {})
                continue
            events = posting_order(
                orders_layout(case), rank, overlap=case.overlap, forward_only=False
            )
            assert peak == walked_peak(plan, rank, events)
            last = plan.chunks_of_rank(rank)[-1]
            assert left_with == {
                CacheKey(microbatch, source): last.index
                for microbatch in range(case.num_microbatches)
                for source in last.held
            }


def broken_step(fault: str):
    """Runs on every rank: a step whose bookkeeping one rank breaks."""
    case = Case(small_model(4, block_size=3), ParallelLayout(1, 2, 2), 4)
    groups, step = build(case, torch.float32)
    if groups.pipeline_rank == 0:
        cache, relay = step.cache, step.communicator._relay
        if fault == "a deposit is never collected":
            collect = cache.collect
            cache.collect = lambda key: None if key == (2, 0) else collect(key)
        elif fault == "a source is never taken out":
            read = cache.read
            cache.read = lambda key, chunk, last: read(key, chunk, last and key != (1, 0))
        elif fault == "a relayed entry is never used":
            relay._inbox[Message("forward", 2, 1)] = None
        elif fault == "a send is left out":
            begin = step.communicator.begin_step

            def begin_with_one_more(table, forward_only):
                begin(table, forward_only)
                step.communicator._expected["forward send"].append(Message("forward", 2, 9))

            step.communicator.begin_step = begin_with_one_more
    run_step(case, groups, step)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "a deposit is never collected",
            "the gradient of source 0 of micro-batch 2, brought by chunk 0, still in the cache",
        ),
        (
            "a source is never taken out",
            "ended with source 0 of micro-batch 1, brought by chunk 0, still in the cache",
        ),
        (
            "a relayed entry is never used",
            "ended before forward hop 2-3 of micro-batch 1, relay lane, was used",
        ),
        ("a send is left out", "before its forward send of forward hop 2-3 of micro-batch 9"),
    ],
)
def test_a_step_that_leaves_something_behind_says_what(fault, message):
    with pytest.raises(RankError, match=message):
        run_ranks(broken_step, 2, fault, timeout=60)
