"""What a stage does, recorded from Megatron-Core, against the same restated by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_attnres.pipeline.simulator.operations import with_relay
from megatron_attnres.pipeline.simulator.schedule import (
    ScheduleSizes,
    pipeline_operations,
    schedule_operations,
)
from tests.pipeline.orders import Event, layouts, posting_order


@settings(max_examples=60)
@given(layout=layouts(), overlap=st.booleans())
def test_every_stage_does_what_is_posted(layout, overlap):
    sizes = ScheduleSizes(
        layout.pipeline, layout.virtual, layout.microbatches, layout.group, overlap
    )
    for rank in range(layout.pipeline):
        operations = schedule_operations(sizes, rank)
        if layout.early_relay:
            operations = with_relay(operations, layout.plan())
        found = [Event(one.what, one.kind, one.message) for one in operations]
        assert found == posting_order(layout, rank, overlap=overlap, forward_only=False)


def test_a_schedule_is_recorded_once():
    sizes = ScheduleSizes(2, 2, 4, 2)
    assert pipeline_operations(sizes) is pipeline_operations(ScheduleSizes(2, 2, 4, 2))


def test_megatron_core_is_as_it_was_after_a_recording():
    import torch
    from megatron.core.pipeline_parallel import schedules

    before = schedules.forward_step, schedules.backward_step, torch.distributed.is_initialized
    schedule_operations(ScheduleSizes(2, 1, 2, 2), 0)
    after = schedules.forward_step, schedules.backward_step, torch.distributed.is_initialized
    assert after == before


@pytest.mark.parametrize("sizes", [ScheduleSizes(4, 2, 6, 4), ScheduleSizes(4, 2, 8, 3)])
def test_sizes_that_megatron_core_refuses_are_refused(sizes):
    with pytest.raises((ValueError, RuntimeError)):
        pipeline_operations(sizes)
