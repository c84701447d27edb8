"""Which sources a reader reads, held against what the depth state does."""

import pytest

from megatron_attnres.analysis.depth.layout import layout_of
from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.pipeline.plan import PipelinePlan
from tests.layouts import small_model


@pytest.mark.parametrize(("layers", "block_size"), [(1, 1), (4, 4), (5, 3), (3, 8), (4, 1), (6, 2)])
def test_readers_read_what_the_depth_state_holds(layers, block_size):
    layout = layout_of(small_model(num_layers=layers, block_size=block_size))
    plan = PipelinePlan((layers,), 1, block_size)
    state, found = DepthState((0,), None), []
    for sublayer in range(2 * layers):
        found.append((len(state.readable()), state.partial is not None))
        state = state.add(1, ends_block=plan.ends_block(sublayer))
    found.append((len(state.readable()), False))
    assert [(reader.sources, reader.reads_partial) for reader in layout.readers] == found
    assert len(layout.sources) == len(state.sources)


def test_names_of_blocks():
    layout = layout_of(small_model(num_layers=3, block_size=4))
    assert [source.name for source in layout.sources] == ["embedding", "block 1", "block 2"]
    assert [source.short for source in layout.sources] == ["E", "1", "2"]
    assert [reader.name for reader in layout.readers[1:3]] == ["layer 1, MLP", "layer 2, attention"]
    assert layout.readers[-1].name == "output head"
    assert layout.block_ends == (2, 3)


def test_names_of_sublayers_in_full_mode():
    layout = layout_of(small_model(num_layers=2, mode="full"))
    names = ["embedding", "1 attn", "1 mlp", "2 attn", "2 mlp"]
    assert [source.name for source in layout.sources] == names
    assert [source.short for source in layout.sources] == ["E", "1a", "1m", "2a", "2m"]
    assert not any(reader.reads_partial for reader in layout.readers)


def test_a_sublayers_readers_come_with_the_head():
    layout = layout_of(small_model(num_layers=2))
    places = {name: [place for place, _ in layout.of(name)] for name in ("attention", "mlp")}
    assert places == {"attention": [0, 2, 4], "mlp": [1, 3, 4]}


def test_a_baseline_has_neither():
    layout = layout_of(small_model(mode="baseline"))
    assert (layout.sources, layout.readers, layout.layers) == ((), (), 4)
