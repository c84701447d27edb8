"""The table of tensors: both sides complete, and the numbers of one side are those of the other."""

import pytest
import torch

from megatron_attnres.interop.joining import joined, split
from megatron_attnres.interop.modeling_attnres import AttnResConfig, AttnResForCausalLM
from megatron_attnres.interop.names import correspondences
from tests.evaluation.checkpoints import shapes_of
from tests.interop.models import qwen3_config
from tests.layouts import small_model

MODELS = {
    "baseline": small_model(mode="baseline"),
    "block": small_model(num_layers=3, block_size=4),
    "full, biased, untied": small_model(mode="full", recency_bias=0.5, tied=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_of_ours_is_named_once(name):
    found = correspondences(MODELS[name])
    assert {one.ours.name: one.ours.shape for one in found} == shapes_of(MODELS[name])
    assert len({one.ours.name for one in found}) == len(found)


def test_every_tensor_of_theirs_is_named_once():
    config = AttnResConfig(**qwen3_config().to_dict() | {"attn_res_recency_bias": True})
    theirs = {name: tuple(one.shape) for name, one in AttnResForCausalLM(config).named_parameters()}
    model = small_model(num_layers=3, recency_bias=0.0, tied=False)
    found = [one for each in correspondences(model) for one in each.theirs]
    assert sorted(one.name for one in found) == sorted(theirs)
    ranks = {one.name: len(one.shape) for one in found}
    assert ranks == {name: len(shape) for name, shape in theirs.items()}


@pytest.mark.parametrize("name", MODELS)
def test_splitting_and_joining_are_inverse(name):
    for one in correspondences(MODELS[name]):
        whole = torch.randn(one.ours.shape)
        parts = split(whole, one)
        assert [tuple(part.shape) for part in parts] == [theirs.shape for theirs in one.theirs]
        assert all(part.is_contiguous() for part in parts)
        assert torch.equal(joined(parts, one), whole)


def test_queries_keys_and_values_lie_by_key_head():
    [fused] = [
        one
        for one in correspondences(MODELS["block"])
        if one.ours.name.endswith("0.attention.linear_qkv.weight")
    ]
    # Two key heads of width 8, two query heads each: rows 0-15 queries, 16-23 key, 24-31 value.
    rows = torch.arange(64.0).unsqueeze(1).expand(64, 16).contiguous()
    query, key, value = (part[:, 0].int().tolist() for part in split(rows, fused))
    assert query == [*range(16), *range(32, 48)]
    assert key == [*range(16, 24), *range(48, 56)]
    assert value == [*range(24, 32), *range(56, 64)]
