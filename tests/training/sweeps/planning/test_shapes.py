"""Shapes solved for their ratios."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.planning.shapes import SIZE_FLAGS, read_shapes, solve_shape

KEYS = {
    "hidden-per-layer": [30, 60],
    "heads-per-layer": [0.2, 0.5],
    "parameters": "2e8",
    "ffn-per-hidden": 4,
}


@given(st.floats(15, 75), st.floats(0.2, 0.6), st.floats(5e7, 1e10), st.floats(2, 5))
def test_a_shape_keeps_parameters_and_ratios(width, heads, parameters, ffn):
    shape = solve_shape(width, heads, parameters, ffn, "here")
    assert shape.parameters == pytest.approx(parameters, rel=0.05)
    # A layer more or less is what the ratio can miss by, and half a head.
    miss = 1.5 / shape.num_layers
    assert abs(math.log(shape.hidden_size / shape.num_layers / width)) <= miss
    assert abs(shape.num_attention_heads - heads * shape.num_layers) <= max(0.5, 1 - heads)
    assert abs(shape.num_attention_heads * shape.kv_channels - shape.hidden_size) <= (
        4 * shape.num_attention_heads
    )
    for size in (shape.hidden_size, shape.ffn_hidden_size, shape.kv_channels):
        assert size % 8 == 0


def test_the_name_tells_the_ratios_that_came_out():
    shape = solve_shape(45, 0.4, 2e8, 4, "here")
    assert (shape.num_layers, shape.hidden_size, shape.num_attention_heads) == (18, 832, 7)
    assert (shape.kv_channels, shape.ffn_hidden_size) == (120, 3328)
    assert shape.name == "w46.2h0.39"


def test_every_pair_is_a_shape():
    names = [shape.name for shape in read_shapes(KEYS, {}, "here")]
    assert names == ["w30h0.21", "w30h0.5", "w60.8h0.2", "w60.8h0.53"]


@pytest.mark.parametrize(
    ("width", "parameters", "ffn"), [(4000, 1e4, 4), (1e-6, 2e8, 4), (1, 300, 4)]
)
def test_a_pair_without_a_solution_is_named(width, parameters, ffn):
    with pytest.raises(InputError, match=r"here: .* has no solution .*; give other ratios"):
        read_shapes(
            {
                "hidden-per-layer": width,
                "heads-per-layer": 0.5,
                "parameters": parameters,
                "ffn-per-hidden": ffn,
            },
            {},
            "here",
        )


def test_pairs_that_come_out_alike_are_named():
    with pytest.raises(InputError, match=r"30 with heads-per-layer 0.21: comes out as w30h0.21"):
        read_shapes(KEYS | {"heads-per-layer": [0.2, 0.21]}, {}, "here")


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named(key):
    with pytest.raises(InputError, match=f"here: has no {key}; give it"):
        read_shapes({name: KEYS[name] for name in KEYS if name != key}, {}, "here")


@pytest.mark.parametrize("flag", SIZE_FLAGS)
def test_a_flag_that_a_shape_decides_is_refused(flag):
    with pytest.raises(InputError, match=f"here: decides {flag}, which flags has too"):
        read_shapes(KEYS, {flag: 8}, "here")
