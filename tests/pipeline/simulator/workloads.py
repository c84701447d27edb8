"""Workloads with exact times, for closed forms to the last digit."""

from fractions import Fraction

from hypothesis import strategies as st

from megatron_attnres.pipeline.simulator.network import Link, Network
from megatron_attnres.pipeline.simulator.schedule import ScheduleSizes
from megatron_attnres.pipeline.simulator.workload import Payload, Workload
from tests.pipeline.orders import layouts


def network(pipeline, bandwidth=1, latency=0, shared=True):
    """Every stage on a node of its own."""
    link = Link(Fraction(bandwidth), Fraction(latency))
    return Network(link, link, tuple(range(pipeline)), shared)


def even_workload(pipeline, virtual, microbatches, forward, backward, entry_bytes=0, overlap=True):
    """A layer per chunk, all alike."""
    chunks = pipeline * virtual
    return Workload(
        ScheduleSizes(pipeline, virtual, microbatches, pipeline, overlap),
        (1,) * chunks,
        (Fraction(forward),) * chunks,
        (Fraction(backward),) * chunks,
        entry_bytes,
    )


@st.composite
def workloads(draw):
    """Any layout that the schedules take, chunks of any length, and one of its payloads."""
    layout = draw(layouts(largest_pipeline=4, largest_virtual=3, most_microbatches=8))
    seconds = st.integers(1, 60).map(lambda tenths: Fraction(tenths, 10))
    chunks = layout.chunks
    workload = Workload(
        ScheduleSizes(
            layout.pipeline, layout.virtual, layout.microbatches, layout.group, draw(st.booleans())
        ),
        layout.layers,
        tuple(draw(st.lists(seconds, min_size=chunks, max_size=chunks))),
        tuple(draw(st.lists(seconds, min_size=chunks, max_size=chunks))),
        draw(st.integers(1, 4)),
    )
    return workload, Payload(layout.block_size, layout.policy, layout.early_relay)
