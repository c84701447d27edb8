"""Against a walk through the model, sublayer by sublayer, that keeps account of what exists."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_attnres.pipeline.plan import PipelinePlan, even_plan, total_entries

BLOCK_SIZES = st.integers(1, 30)


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


@st.composite
def layouts(draw, smallest=1):
    """Layers per chunk and P."""
    pipeline = draw(st.integers(1, 6))
    chunks = pipeline * draw(st.integers(1, 4))
    layers = draw(st.lists(st.integers(smallest, 5), min_size=chunks, max_size=chunks))
    return tuple(layers), pipeline


@settings(max_examples=300)
@given(layouts(smallest=0).filter(lambda layout: sum(layout[0])), BLOCK_SIZES)
def test_chunks_and_hops_are_what_a_walk_sees(layout, block_size):
    layers, pipeline = layout
    plan = PipelinePlan(layers, pipeline, block_size)
    walked = walk(layers, block_size)
    assert len(plan.chunks) == len(walked)
    for chunk, seen in zip(plan.chunks, walked, strict=True):
        assert list(chunk.layers) == seen.layers
        assert chunk.available == seen.available
        assert chunk.produced == seen.produced
        assert chunk.starts_with_partial == seen.inside_block
    for hop, seen in zip(plan.hops, walked[1:], strict=True):
        assert (hop.sources, hop.partial) == (seen.available, seen.inside_block)
        assert hop.entries == len(seen.available) + seen.inside_block


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
        sublayers_before = 2 * plan.chunks[hop.index + 1].layers.start
        assert hop.partial == (sublayers_before % block_size > 0)


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
    plan = PipelinePlan(*layout, 1)
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


# DESIGN.md section 3: layers, S, P, V: naive entries in all, of the largest hop.
TABLE = {
    (8, 4, 4, 2): (23, 5),
    (8, 4, 4, 1): (9, 4),
    (8, 2, 2, 2): (15, 7),
    (16, 4, 4, 4): (79, 9),
    (64, 16, 8, 4): (167, 9),
    (64, 16, 8, 1): (35, 8),
}


@pytest.mark.parametrize("layout", TABLE)
def test_entries_of_the_designs_table(layout):
    layers, block_size, pipeline, virtual = layout
    hops = even_plan(layers, pipeline, virtual, block_size).hops
    assert (total_entries(hops), max(hop.entries for hop in hops)) == TABLE[layout]


def test_hops_of_the_designs_first_row():
    hops = even_plan(8, 4, 2, 4).hops
    assert [hop.entries for hop in hops] == [2, 2, 3, 3, 4, 4, 5]
    assert [hop.partial for hop in hops] == [True, False] * 3 + [True]


def test_a_boundary_inside_a_layer_and_a_short_last_block():
    plan = even_plan(4, 2, 1, 3)
    first, last = plan.chunks
    # Sublayers 0-2 | 3-5 | 6-7; the hop falls after sublayer 3.
    assert (first.produced, last.available, last.produced) == ((0, 1), (0, 1), (2, 3))
    assert last.starts_with_partial
    assert [sublayer for sublayer in range(8) if plan.ends_block(sublayer)] == [2, 5, 7]


def test_one_chunk_has_no_hop():
    plan = even_plan(3, 1, 1, 4)
    assert plan.hops == ()
    assert plan.chunks[0].produced == (0, 1, 2)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4))
def test_even_plans_divide_the_layers_or_say_so(layers, pipeline, virtual):
    chunks = pipeline * virtual
    if layers % chunks:
        with pytest.raises(ValueError, match=f"{layers} layers .* {chunks} equal chunks"):
            even_plan(layers, pipeline, virtual, 4)
    else:
        plan = even_plan(layers, pipeline, virtual, 4)
        assert plan.layers_per_chunk == (layers // chunks,) * chunks
