"""Any stretch of any slice is made of boxes of the whole: each element once, in its place."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_attnres.parallel.parameters import Sharding
from megatron_attnres.training.checkpoints.boxes import Slicing, boxes_of

SHARDINGS = [None, Sharding(0), Sharding(1), Sharding(0, 2)]


@settings(max_examples=300)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 6),
    sharding=st.sampled_from(SHARDINGS),
    size=st.integers(1, 3),
    data=st.data(),
)
def test_boxes_put_a_stretch_where_it_belongs(rows, columns, sharding, size, data):
    stride = sharding.stride if sharding is not None else 1
    shape = (rows * stride, columns)
    rank = data.draw(st.integers(0, size - 1))
    start = data.draw(st.integers(0, rows * stride * columns))
    stop = data.draw(st.integers(start, rows * stride * columns))
    slicing = Slicing(shape, sharding, rank, size)
    whole = torch.arange(torch.Size(slicing.whole_shape).numel()).view(slicing.whole_shape)
    own = whole if sharding is None else sharding.slice(whole, rank, size)
    assert tuple(own.shape) == shape
    stretch = own.reshape(-1)[start:stop].clone()
    covered = torch.zeros_like(stretch)
    for box in boxes_of(slicing, start, stop):
        there = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        found = stretch.as_strided(box.sizes, box.strides, box.start)
        assert torch.equal(whole[there], found)
        covered.as_strided(box.sizes, box.strides, box.start).add_(1)
    assert (covered == 1).all()


def test_a_vector_s_stretch_is_one_box():
    (box,) = boxes_of(Slicing((7,), None, 0, 2), 2, 5)
    assert (box.offsets, box.sizes, box.start, box.strides) == ((2,), (3,), 0, (1,))


def test_a_matrix_s_stretch_is_part_of_a_row_whole_rows_and_part_of_a_row():
    boxes = boxes_of(Slicing((4, 10), Sharding(0), 1, 2), 5, 32)
    assert [(box.offsets, box.sizes) for box in boxes] == [
        ((4, 5), (1, 5)),
        ((5, 0), (2, 10)),
        ((7, 0), (1, 2)),
    ]
