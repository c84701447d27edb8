"""Against a walk through the model that keeps account of what exists, and which rank holds it."""

from dataclasses import dataclass
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_attnres.pipeline.plan import (
    PipelinePlan,
    even_layers,
    largest_hop,
    least_entries,
    paper_counts,
    total_entries,
)

BLOCK_SIZES = st.integers(1, 30)
POLICIES = st.sampled_from(["naive", "cached"])


@dataclass
class Walked:
    """What a walk through the model saw of one chunk."""

    layers: list[int]
    available: tuple[int, ...]
    produced: tuple[int, ...]
    inside_block: bool


def walk(layers_per_chunk, block_size):
    num_sublayers = 2 * sum(layers_per_chunk)
    sources, in_block, sublayer = [], 0, 0
    seen = []
    for index, layers in enumerate(layers_per_chunk):
        available, inside_block, first = tuple(sources), in_block > 0, sublayer
        if index == 0:
            sources.append(0)
        for _ in range(2 * layers):
            in_block += 1
            sublayer += 1
            if in_block == block_size or sublayer == num_sublayers:
                sources.append(len(sources))
                in_block = 0
        produced = tuple(sources[len(available) :])
        layer_range = list(range(first // 2, sublayer // 2))
        seen.append(Walked(layer_range, available, produced, inside_block))
    assert in_block == 0
    return seen


def walk_ranks(walked, pipeline, keeps):
    """What each hop must bring if ranks keep what they had, or forget it: (relayed, critical)."""
    has = [set() for _ in range(pipeline)]
    has[0] |= set(walked[0].produced)
    crossings = []
    for index, (sender, receiver) in enumerate(pairwise(walked)):
        rank = (index + 1) % pipeline
        lacking = [source for source in receiver.available if source not in has[rank]]
        if not keeps:
            lacking = list(receiver.available)
        critical = tuple(source for source in lacking if source in sender.produced)
        relayed = tuple(source for source in lacking if source not in sender.produced)
        crossings.append((relayed, critical))
        has[rank] |= {*lacking, *receiver.produced}
    return crossings


@st.composite
def layouts(draw):
    """Layers per chunk and P; sometimes a chunk with the embedding or the head alone."""
    pipeline = draw(st.integers(1, 8))
    chunks = pipeline * draw(st.integers(1, 4))
    layers = draw(st.lists(st.integers(1, 5), min_size=chunks, max_size=chunks))
    if chunks > 1 and draw(st.booleans()):
        layers[0] = 0
    if chunks > 2 and draw(st.booleans()):
        layers[-1] = 0
    return tuple(layers), pipeline


@settings(max_examples=300)
@given(layouts(), BLOCK_SIZES, POLICIES)
def test_chunks_and_hops_are_what_a_walk_sees(layout, block_size, policy):
    layers, pipeline = layout
    plan = PipelinePlan(layers, pipeline, block_size, policy)
    walked = walk(layers, block_size)
    assert len(plan.chunks) == len(walked)
    for chunk, seen in zip(plan.chunks, walked, strict=True):
        assert list(chunk.layers) == seen.layers
        assert chunk.available == seen.available
        assert chunk.produced == seen.produced
        assert chunk.starts_with_partial == seen.inside_block
    crossings = walk_ranks(walked, pipeline, keeps=policy == "cached")
    for hop, crossing, seen in zip(plan.hops, crossings, walked[1:], strict=True):
        assert (hop.relayed, hop.critical) == crossing
        assert hop.partial == seen.inside_block
        assert hop.sources == tuple(sorted({*hop.relayed, *hop.critical}))
        assert hop.entries == len(hop.sources) + seen.inside_block
        assert hop.critical_entries == len(hop.critical) + seen.inside_block


@given(layouts(), BLOCK_SIZES)
def test_a_rank_holds_what_its_earlier_chunks_had(layout, block_size):
    plan = PipelinePlan(*layout, block_size)
    for rank in range(plan.pipeline_size):
        had = set()
        for chunk in plan.chunks_of_rank(rank):
            assert set(chunk.held) == had
            assert plan.from_cache(chunk) == chunk.held
            had |= {*chunk.available, *chunk.produced}


@given(layouts(), BLOCK_SIZES)
def test_cached_sources_reach_each_rank_that_reads_them_exactly_once(layout, block_size):
    plan = PipelinePlan(*layout, block_size)
    for rank in range(plan.pipeline_size):
        chunks = plan.chunks_of_rank(rank)
        came = [s for chunk in chunks if chunk.index for s in plan.hops[chunk.index - 1].sources]
        made = [source for chunk in chunks for source in chunk.produced]
        read = {source for chunk in chunks for source in chunk.available}
        assert len(came) == len(set(came))
        assert not {*came} & {*made}
        assert read <= {*came, *made}
        assert {*came} <= read
    assert total_entries(plan.hops) == least_entries(plan)


@given(layouts(), BLOCK_SIZES, POLICIES)
def test_what_a_chunk_relays_is_before_it_when_it_starts(layout, block_size, policy):
    plan = PipelinePlan(*layout, block_size, policy)
    relayed_by = {
        chunk.index: set(hop.relayed) for chunk, hop in zip(plan.chunks, plan.hops, strict=False)
    }
    for chunk in plan.chunks[:-1]:
        arrives = set(plan.hops[chunk.index - 1].sources) if chunk.index else set()
        assert relayed_by[chunk.index] <= arrives


@given(layouts().filter(lambda layout: layout[1] > 1), BLOCK_SIZES)
def test_a_cache_takes_relayed_entries_alone_from_a_hop(layout, block_size):
    cached, naive = (PipelinePlan(*layout, block_size, policy) for policy in ("cached", "naive"))
    assert cached.chunks == naive.chunks
    for one, other in zip(cached.hops, naive.hops, strict=True):
        assert set(one.sources) <= set(other.sources)
        assert (one.critical, one.partial) == (other.critical, other.partial)
    assert not any(naive.from_cache(chunk) for chunk in naive.chunks)


@given(layouts(), BLOCK_SIZES)
def test_without_virtual_stages_the_policies_are_one(layout, block_size):
    layers, _ = layout
    cached, naive = (
        PipelinePlan(layers, len(layers), block_size, policy) for policy in ("cached", "naive")
    )
    assert cached.hops == naive.hops


@given(layouts(), BLOCK_SIZES)
def test_every_source_is_produced_exactly_once_and_before_it_is_read(layout, block_size):
    plan = PipelinePlan(*layout, block_size)
    num_blocks = -(-plan.num_sublayers // block_size)
    produced = []
    for chunk in plan.chunks:
        assert chunk.available == tuple(produced)
        produced += chunk.produced
    assert produced == list(range(num_blocks + 1))


@given(layouts(), BLOCK_SIZES)
def test_a_partial_sum_crosses_unless_the_hop_is_a_block_boundary(layout, block_size):
    plan = PipelinePlan(*layout, block_size)
    for hop in plan.hops:
        before = 2 * plan.chunks[hop.index + 1].layers.start
        assert hop.partial == (before % block_size > 0 and before < plan.num_sublayers)


@given(layouts(), BLOCK_SIZES)
def test_block_ends_are_multiples_of_the_size_and_the_models_end(layout, block_size):
    plan = PipelinePlan(*layout, block_size)
    ends = [sublayer + 1 for sublayer in range(plan.num_sublayers) if plan.ends_block(sublayer)]
    multiples = list(range(block_size, plan.num_sublayers, block_size))
    assert ends == [*multiples, plan.num_sublayers]


@given(layouts(), BLOCK_SIZES | st.none())
def test_chunks_go_round_the_ranks_and_cover_the_layers(layout, block_size):
    layers, pipeline = layout
    plan = PipelinePlan(layers, pipeline, block_size)
    assert plan.virtual_size * pipeline == len(layers)
    assert [layer for chunk in plan.chunks for layer in chunk.layers] == list(range(sum(layers)))
    for rank in range(pipeline):
        chunks = plan.chunks_of_rank(rank)
        assert [chunk.index for chunk in chunks] == list(range(rank, len(layers), pipeline))
        assert [chunk.virtual_stage for chunk in chunks] == list(range(plan.virtual_size))
        assert {chunk.rank for chunk in chunks} == {rank}


@given(layouts())
def test_full_mode_has_no_partial_sum(layout):
    plan = PipelinePlan(*layout, 1, "naive")
    assert not any(hop.partial for hop in plan.hops)
    for hop in plan.hops:
        assert hop.entries == 1 + 2 * plan.chunks[hop.index + 1].layers.start


@given(layouts())
def test_the_baseline_carries_one_residual_stream_a_hop(layout):
    layers, pipeline = layout
    plan = PipelinePlan(layers, pipeline, None)
    assert [(hop.sources, hop.partial) for hop in plan.hops] == [((), True)] * (len(layers) - 1)
    assert total_entries(plan.hops) == len(layers) - 1
    assert not any(plan.ends_block(sublayer) for sublayer in range(plan.num_sublayers))


# DESIGN.md section 3: layers, S, P, V: entries naive, cached, critical, relayed, least possible, of
# the largest naive hop, of the largest cached hop.
TABLE = {
    (8, 4, 4, 2): (23, 15, 8, 7, 15, 5, 3),
    (8, 4, 4, 1): (9, 9, 4, 5, 9, 4, 4),
    (8, 2, 2, 2): (15, 7, 7, 0, 7, 7, 3),
    (16, 4, 4, 4): (79, 31, 16, 15, 31, 9, 3),
    (64, 16, 8, 4): (167, 77, 32, 45, 77, 9, 3),
    (64, 16, 8, 1): (35, 35, 8, 27, 35, 8, 8),
}


def both_plans(layers, block_size, pipeline, virtual):
    """The naive and the cached plan of equal chunks."""
    per_chunk = even_layers(layers, pipeline * virtual)
    return [PipelinePlan(per_chunk, pipeline, block_size, one) for one in ("naive", "cached")]


@pytest.mark.parametrize("layout", TABLE)
def test_entries_of_the_designs_table(layout):
    naive, cached = both_plans(*layout)
    assert (
        total_entries(naive.hops),
        total_entries(cached.hops),
        sum(hop.critical_entries for hop in cached.hops),
        sum(len(hop.relayed) for hop in cached.hops),
        least_entries(cached),
        largest_hop(naive.hops),
        largest_hop(cached.hops),
    ) == TABLE[layout]
    assert least_entries(naive) == least_entries(cached)


def test_hops_of_the_designs_first_row():
    naive, cached = both_plans(8, 4, 4, 2)
    assert [
        (one.entries, other.entries, other.critical_entries, len(other.relayed))
        for one, other in zip(naive.hops, cached.hops, strict=True)
    ] == [
        (2, 2, 2, 0),
        (2, 2, 1, 1),
        (3, 3, 1, 2),
        (3, 2, 1, 1),
        (4, 2, 1, 1),
        (4, 2, 1, 1),
        (5, 2, 1, 1),
    ]
    assert [hop.partial for hop in cached.hops] == [True, False] * 3 + [True]


def test_a_deep_models_critical_entries_are_one_more_than_standard_residuals():
    _, cached = both_plans(64, 16, 8, 4)
    [baseline, _] = both_plans(64, None, 8, 4)
    assert sum(hop.critical_entries for hop in cached.hops) == 32
    assert total_entries(baseline.hops) == 31


@pytest.mark.parametrize(
    ("pipeline", "virtual", "blocks_per_chunk"), product((1, 2, 3, 4, 8), (1, 2, 4), (1, 2, 4))
)
def test_the_papers_counts_are_the_totals_without_embedding_and_partial_sums(
    pipeline, virtual, blocks_per_chunk
):
    """Eq. 8 sends a later chunk all P N_p newest blocks; N_p of them its own rank has produced."""
    chunks = pipeline * virtual
    naive, cached = both_plans(2 * chunks, 4 // blocks_per_chunk, pipeline, virtual)
    assert not any(hop.partial for hop in naive.hops)
    eq7, eq8 = paper_counts(blocks_per_chunk * chunks, pipeline, virtual)
    assert eq7 == total_entries(naive.hops) - (chunks - 1)
    own = (virtual - 1) * pipeline * blocks_per_chunk
    assert eq8 == total_entries(cached.hops) - (pipeline - 1) + own


def test_a_boundary_inside_a_layer_and_a_short_last_block():
    plan = PipelinePlan((2, 2), 2, 3)
    first, last = plan.chunks
    # Sublayers 0-2 | 3-5 | 6-7; the hop falls after sublayer 3.
    assert (first.produced, last.available, last.produced) == ((0, 1), (0, 1), (2, 3))
    assert last.starts_with_partial
    assert [sublayer for sublayer in range(8) if plan.ends_block(sublayer)] == [2, 5, 7]


def test_chunks_with_the_embedding_or_the_head_alone():
    first, middle, last = PipelinePlan((0, 2, 0), 3, 3).chunks
    assert (first.produced, first.available) == ((0,), ())
    assert (middle.available, middle.produced, middle.starts_with_partial) == ((0,), (1, 2), False)
    # The model's last block is short, and it is complete all the same.
    assert (last.available, last.produced, last.starts_with_partial) == ((0, 1, 2), (), False)


def test_one_chunk_has_no_hop():
    plan = PipelinePlan((3,), 1, 4)
    assert plan.hops == ()
    assert largest_hop(plan.hops) == least_entries(plan) == 0
    assert plan.chunks[0].produced == (0, 1, 2)


@pytest.mark.parametrize("layers", [(1, 0, 1, 1), (0, 0, 1, 1), (1, 1, 0, 0)])
def test_an_empty_chunk_in_the_middle_is_refused(layers):
    with pytest.raises(ValueError, match=r"only the first chunk .* and the last .* may have none"):
        PipelinePlan(layers, 2, 4)


def test_chunks_that_do_not_divide_over_the_ranks_are_refused():
    with pytest.raises(ValueError, match="3 chunks do not divide over 2 ranks"):
        PipelinePlan((1, 1, 1), 2, 4)


@given(st.integers(1, 40), st.integers(1, 24))
def test_equal_chunks_divide_the_layers_or_say_so(layers, chunks):
    if layers % chunks:
        with pytest.raises(ValueError, match=f"{layers} layers .* {chunks} equal chunks"):
            even_layers(layers, chunks)
    else:
        assert even_layers(layers, chunks) == (layers // chunks,) * chunks
