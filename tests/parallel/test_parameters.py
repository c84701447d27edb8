import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_attnres.parallel.parameters import (
    Sharding,
    has_partial_gradient,
    initialize_parameter,
    is_tied_across_stages,
    mark_partial_gradient,
    mark_sharded,
    mark_tied_across_stages,
    normal_initializer,
    scaled_normal_initializer,
    sharding_of,
)


@st.composite
def shardings(draw):
    """A full matrix of distinct numbers, how it is sliced, and by how many ranks."""
    sharding = Sharding(draw(st.integers(0, 1)), draw(st.integers(1, 3)))
    world_size = draw(st.integers(1, 4))
    shape = [draw(st.integers(1, 4)), draw(st.integers(1, 4))]
    shape[sharding.dim] *= world_size * sharding.stride
    return torch.arange(float(shape[0] * shape[1])).view(shape), sharding, world_size


def glued(parts, sharding):
    """The full tensor: of every matrix the parts of all ranks, then the next matrix."""
    matrices = [part.tensor_split(sharding.stride, dim=sharding.dim) for part in parts]
    return torch.cat(
        [of_rank[i] for i in range(sharding.stride) for of_rank in matrices], dim=sharding.dim
    )


@given(shardings())
def test_slices_glue_to_the_full_tensor(case):
    full, sharding, world_size = case
    parts = [sharding.slice(full, rank, world_size) for rank in range(world_size)]
    assert torch.equal(glued(parts, sharding), full)
    for part in parts:
        assert sharding.full_shape(part.shape, world_size) == list(full.shape)


def test_a_stride_of_two_slices_gate_and_up_projection_alike():
    rows = torch.arange(8.0).view(8, 1)  # gate 0 to 3 on top of up 4 to 7
    sharding = Sharding(0, stride=2)
    assert sharding.slice(rows, 0, 2).flatten().tolist() == [0, 1, 4, 5]
    assert sharding.slice(rows, 1, 2).flatten().tolist() == [2, 3, 6, 7]


def initialized(shape, name="layers.0.weight", seed=7, sharding=None, rank=0, size=1, dtype=None):
    parameter = nn.Parameter(torch.full(shape, torch.nan, dtype=dtype))
    if sharding is not None:
        mark_sharded(parameter, sharding)
    initialize_parameter(parameter, name, seed, normal_initializer(0.5), rank, size)
    return parameter.detach()


@pytest.mark.parametrize("sharding", [Sharding(0), Sharding(1), Sharding(0, stride=2)])
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_ranks_hold_slices_of_one_full_tensor(sharding, size):
    full = initialized((16, 24))
    shape = [16, 24]
    shape[sharding.dim] //= size
    parts = [
        initialized(tuple(shape), sharding=sharding, rank=rank, size=size) for rank in range(size)
    ]
    assert torch.equal(glued(parts, sharding), full)


def test_unsliced_parameters_are_equal_on_all_ranks():
    assert torch.equal(initialized((4, 3), rank=1, size=2), initialized((4, 3)))


def test_values_depend_on_seed_and_name_alone():
    first = initialized((16, 24))
    torch.manual_seed(99)
    torch.randn(5)
    assert torch.equal(initialized((16, 24)), first)
    others = [
        initialized((16, 24), seed=8),
        initialized((16, 24), name="layers.1.weight"),
        # Seed and name must not run into each other.
        initialized((16, 24), name="1x", seed=1),
        initialized((16, 24), name="x", seed=11),
    ]
    for index, other in enumerate(others):
        assert all(not torch.equal(other, value) for value in (first, *others[:index]))


def test_initializing_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    initialized((16, 24))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_hold_the_float32_values(dtype):
    assert torch.equal(initialized((4, 3), dtype=dtype), initialized((4, 3)).to(dtype))


@pytest.mark.parametrize(
    ("initializer", "std"),
    [(normal_initializer(0.02), 0.02), (scaled_normal_initializer(0.02, 8), 0.005)],
)
def test_deviations(initializer, std):
    values = torch.empty(200, 200)
    initializer(values, torch.Generator().manual_seed(0))
    assert values.std().item() == pytest.approx(std, rel=0.02)
    assert abs(values.mean().item()) < std / 50


@pytest.mark.parametrize("sharding", [Sharding(0), Sharding(1), Sharding(0, stride=2)])
def test_marks_are_read_back(sharding):
    parameter = nn.Parameter(torch.ones(4, 4))
    assert sharding_of(parameter) is None
    assert not has_partial_gradient(parameter)
    assert not is_tied_across_stages(parameter)
    mark_sharded(parameter, sharding)
    mark_partial_gradient(parameter)
    mark_tied_across_stages(parameter, copy=True)
    assert sharding_of(parameter) == sharding
    assert has_partial_gradient(parameter)
    assert is_tied_across_stages(parameter)
    assert parameter.shared_copy
