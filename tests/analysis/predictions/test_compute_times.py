"""Compute times of chunks: from a layer's, from FLOPs, and of the other residuals."""

from dataclasses import replace

import pytest

from megatron_attnres.analysis.predictions.compute_times import (
    LayerTimes,
    MeasuredTimes,
    times_from_flops,
)
from megatron_attnres.model.configuration import ModelConfig
from megatron_attnres.model.flops import head_forward_flops, layer_forward_flops
from megatron_attnres.pipeline.timeline.chunk_times import ChunkSeconds

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=4,
    vocab_size=64,
    seq_length=8,
)
LAYER, HEAD = layer_forward_flops(MODEL), head_forward_flops(MODEL)


def test_chunks_have_their_layers_and_the_last_the_head():
    times = LayerTimes(1.0, 2.5, head_forward=0.25, head_backward=0.5)
    assert times.of_chunks((0, 3, 2), reads_depth=False) == ((0, 3, 2.25), (0, 7.5, 5.5))


def test_reads_from_depth_lengthen_layers_but_not_the_head():
    times = LayerTimes(1.0, 2.0, 0.25, 0.5, depth_attention_share=0.5)
    assert times.of_chunks((2, 2), reads_depth=False) == ((2, 2.25), (4, 4.5))
    assert times.of_chunks((2, 2), reads_depth=True) == ((3, 3.25), (6, 6.5))


@pytest.mark.parametrize(
    ("recompute", "again"),
    [("none", 0), ("selective", LAYER.core_attention), ("full", LAYER.total)],
)
def test_flops_over_a_rate(recompute, again):
    times = times_from_flops(MODEL, 3, 1e6, recompute, 0.1)
    assert times.forward == pytest.approx(3 * LAYER.total / 1e6)
    assert times.backward == pytest.approx(3 * (2 * LAYER.total + again) / 1e6)
    assert times.head_forward == pytest.approx(3 * HEAD / 1e6)
    assert times.head_backward == pytest.approx(2 * times.head_forward)
    assert times.depth_attention_share == 0.1


def test_without_a_vocabulary_there_is_no_head():
    times = times_from_flops(replace(MODEL, vocab_size=0), 1, 1e6, "full", 0.0)
    assert times.head_forward == times.head_backward == 0


def test_measured_times_turn_into_those_of_the_other_residuals():
    seconds = ChunkSeconds((1.2, 2.4), (2.4, 4.8))
    measured = MeasuredTimes(seconds, reads_depth=True, depth_attention_share=0.2)
    assert measured.of_chunks((1, 1), reads_depth=True) == seconds
    forward, backward = measured.of_chunks((1, 1), reads_depth=False)
    assert forward == pytest.approx((1, 2))
    assert backward == pytest.approx((2, 4))
    standard = MeasuredTimes(seconds, reads_depth=False, depth_attention_share=0.5)
    assert standard.of_chunks((1, 1), reads_depth=True).forward == pytest.approx((1.8, 3.6))
