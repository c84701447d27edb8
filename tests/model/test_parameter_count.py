"""Parameters by arithmetic against those of models that are built."""

from dataclasses import replace

import pytest
import torch

from megatron_attnres.model.configuration import AttnResConfig
from megatron_attnres.model.parameter_count import layer_parameters, parameter_count
from megatron_attnres.parallel.layout import ParallelLayout
from tests.distributed import restart_job, run_ranks
from tests.layouts import Case, build, small_model

MODELS = {
    "baseline": small_model(mode="baseline"),
    "baseline, untied": small_model(mode="baseline", tied=False),
    "blocks": small_model(num_layers=5, block_size=3),
    "blocks, untied": small_model(tied=False),
    "full": small_model(mode="full"),
    "full with bias, untied": small_model(mode="full", tied=False, recency_bias=1.0),
    "cumulative with bias": small_model(sources="cumulative", recency_bias=1.0),
    "one layer": small_model(num_layers=1, block_size=2),
}
# A tied output layer is the embedding, which parameters() gives once.
VOCABULARY = ("embedding.weight", "output.weight")
DEPTH = ("query", "key_norm_weight", "recency_bias")


def built_counts(models):
    """Of every model: all, those of the vocabulary, those about depth, one layer's rest."""
    counts = {}
    for name, model in models.items():
        restart_job()
        _, step = build(Case(model, ParallelLayout()), torch.float32)
        sizes = {key: p.numel() for key, p in step.chunks[0].module.named_parameters()}
        depth = {key for key in sizes if key.endswith(DEPTH)}
        first = [key for key in sizes if key.startswith("layers.0.") and key not in depth]
        counts[name] = {
            "total": sum(sizes.values()),
            "vocabulary": sum(sizes[key] for key in VOCABULARY if key in sizes),
            "depth": sum(sizes[key] for key in depth),
            "first layer": sum(sizes[key] for key in first),
        }
    return counts


@pytest.fixture(scope="module")
def built():
    return run_ranks(built_counts, 1, MODELS)[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_built_model_has_as_many(built, name):
    count, found = parameter_count(MODELS[name]), built[name]
    assert count.total == found["total"]
    assert count.embedding + count.output == found["vocabulary"]
    assert count.non_embedding == found["total"] - found["vocabulary"]
    assert count.depth_attention == found["depth"]
    assert layer_parameters(MODELS[name]) == found["first layer"]


def test_the_operator_and_the_block_size_change_nothing():
    model = small_model()
    for attn_res in (AttnResConfig("block", 1), AttnResConfig("full", 1, operator="plain")):
        assert parameter_count(replace(model, attn_res=attn_res)) == parameter_count(model)
