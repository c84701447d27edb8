import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.depth_attention import tiles

CPU = torch.device("cpu")


@given(st.integers(1, 5000), st.integers(1, 1 << 24))
def test_tiles_cover_the_tokens_in_order_and_are_of_bounded_size(tokens, bytes_per_token):
    stretches = tiles.token_tiles(tokens, bytes_per_token, CPU)
    covered = [token for stretch in stretches for token in range(stretch.start, stretch.stop)]
    assert covered == list(range(tokens))
    lengths = [stretch.stop - stretch.start for stretch in stretches]
    assert set(lengths[:-1]) <= {lengths[0]}
    assert lengths[-1] <= lengths[0]
    assert lengths[0] == 1 or lengths[0] * bytes_per_token <= tiles._BYTES["cpu"]


@pytest.mark.parametrize("tile", [slice(0, 3), slice(3, 5)])
def test_a_tile_is_gathered_side_by_side_and_scattered_again(tile):
    torch.manual_seed(0)
    rows = [torch.randn(5, 4) for _ in range(3)]
    gathered = tiles.gather(rows, tile, torch.empty(3, 3, 4))
    assert torch.equal(gathered, torch.stack([row[tile] for row in rows], dim=1))
    targets = [torch.zeros(5, 4) for _ in rows]
    tiles.scatter(gathered, targets, tile)
    for target, row in zip(targets, rows, strict=True):
        assert torch.equal(target[tile], row[tile])
        assert target.count_nonzero() == row[tile].count_nonzero()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gathered_tensor_is_scaled_where_it_has_a_scale(dtype):
    torch.manual_seed(0)
    rows = [torch.randn(5, 4).to(dtype) for _ in range(2)]
    scale = torch.rand(5, 1)
    gathered = tiles.gather(rows, slice(1, 4), torch.empty(3, 2, 4, dtype=dtype), [None, scale])
    assert torch.equal(gathered[:, 0], rows[0][1:4])
    assert torch.equal(gathered[:, 1], rows[1][1:4] * scale[1:4].to(dtype))
