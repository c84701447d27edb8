"""Budgets: units, and whole iterations."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.errors import InputError
from megatron_attnres.model.configuration import AttnResConfig
from megatron_attnres.model.flops import training_flops
from megatron_attnres.model.parameter_count import parameter_count
from megatron_attnres.training.sweeps.planning.budgets import (
    Budget,
    budgets_of,
    flops_of,
    iterations_of,
)
from tests.layouts import small_model

MODEL = small_model(mode="full")
modes = st.sampled_from([("baseline", 1), ("block", 4), ("full", 1)])


@pytest.mark.parametrize(
    ("text", "flops"),
    [
        ("3e13 FLOPs", 3e13),
        ("1 PFLOP/s-days", 8.64e19),
        (" 0.5  PFLOP/s-days ", 4.32e19),
    ],
)
def test_compute_has_a_unit(text, flops):
    assert flops_of(text, "grid: compute") == flops


@pytest.mark.parametrize(
    "value",
    [3e13, "3e13", "3e13 PFLOPs", "3e13 flops", "3e13FLOPs", "FLOPs", "1 2 FLOPs", True, [1]],
)
def test_compute_without_its_unit_names_both(value):
    with pytest.raises(InputError) as refused:
        flops_of(value, "grid: compute")
    assert str(refused.value) == (
        f'grid: compute: {value!r} has no unit that is known; give e.g. "3 FLOPs" or '
        '"3 PFLOP/s-days"'
    )


@pytest.mark.parametrize("number", ["x", "nan", "inf", "-1", "0", "1e31"])
def test_compute_is_a_number_above_0(number):
    with pytest.raises(InputError, match="give a number above 0"):
        flops_of(f"{number} FLOPs", "grid: compute")


def test_one_kind_of_budget():
    with pytest.raises(InputError, match="grid: has tokens and compute; give one of them"):
        budgets_of({"tokens": 5, "compute": "3 FLOPs"}, "grid")
    assert budgets_of({"seeds": 1}, "grid") == ()
    assert budgets_of({"tokens": [5, "1e3"]}, "grid") == (
        Budget("tokens", 5),
        Budget("tokens", 1000),
    )


@pytest.mark.parametrize(
    ("tokens", "iterations"), [(32, 1), (47, 1), (49, 2), (3200, 100), (3215, 100), (3217, 101)]
)
def test_tokens_are_rounded_to_the_nearest_iteration(tokens, iterations):
    model = replace(MODEL, seq_length=8)
    assert iterations_of(Budget("tokens", tokens), model, 4) == iterations


def test_a_budget_below_one_iteration_is_none():
    model = replace(MODEL, seq_length=8)
    with pytest.raises(InputError, match=r"a budget of 16 tokens is 0.5 iterations of 4"):
        iterations_of(Budget("tokens", 16), model, 4)


@given(modes, st.integers(1, 64), st.floats(1e6, 1e15))
def test_compute_is_met_within_half_an_iteration(mode, batch, flops):
    model = replace(MODEL, attn_res=AttnResConfig(*mode))
    iteration = batch * training_flops(model)
    if flops < iteration:
        with pytest.raises(InputError, match=r"FLOPs is .* iterations of"):
            iterations_of(Budget("compute", flops), model, batch)
        return
    iterations = iterations_of(Budget("compute", flops), model, batch)
    assert abs(iterations * iteration - flops) <= iteration * (0.5 + 1e-9)


@given(st.floats(1, 1000))
def test_all_modes_of_a_size_get_the_same_tokens_per_parameter(ratio):
    iterations = {
        iterations_of(
            Budget("tokens-per-parameter", ratio),
            replace(MODEL, attn_res=AttnResConfig(mode, size)),
            4,
        )
        for mode, size in (("baseline", 1), ("block", 4), ("full", 1))
    }
    baseline = replace(MODEL, attn_res=AttnResConfig("baseline"))
    tokens = ratio * parameter_count(baseline).total
    assert len(iterations) == 1
    assert abs(iterations.pop() * 4 * MODEL.seq_length - tokens) <= 2 * MODEL.seq_length
