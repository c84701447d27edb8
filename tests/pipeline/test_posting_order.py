"""No layout can deadlock, and no message can be taken for another one. Without torch.

All ranks of random layouts work off the posting order of Megatron-Core's schedules (orders.py)
against sends on the critical lanes that block until the receiver has posted its receive.
In the product no send blocks: it is posted, and waited for at the end of the step. On the relay
lanes the proof needs that: they are modelled as in the product, and one test shows the deadlock of
the contrary.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_attnres.pipeline.messages import (
    backward_receives,
    backward_sends,
    forward_receives,
    forward_sends,
)
from tests.pipeline.orders import Layout, layouts, posting_order, run_to_the_end


def orders(layout, overlap, forward_only=False):
    return [
        posting_order(layout, rank, overlap=overlap, forward_only=forward_only)
        for rank in range(layout.pipeline)
    ]


@settings(max_examples=300)
@given(layouts(8, 4, 24), st.booleans(), st.booleans())
def test_every_layout_ends_with_blocking_critical_sends(layout, overlap, forward_only):
    run_to_the_end(orders(layout, overlap, forward_only))


@settings(max_examples=300)
@given(layouts(8, 4, 24), st.booleans(), st.booleans())
def test_every_layout_ends_with_sends_that_do_not_block(layout, overlap, forward_only):
    run_to_the_end(orders(layout, overlap, forward_only), blocking=())


@given(layouts(8, 1, 24), st.booleans())
def test_without_virtual_stages_relay_sends_may_block_too(layout, forward_only):
    run_to_the_end(orders(layout, False, forward_only), blocking=("critical", "relay"))


def test_with_virtual_stages_relay_sends_must_not_block():
    """Ranks that begin chunks of two hops between them wait for each other's next receive."""
    layout = Layout(2, 2, 2, 2, block_size=1, policy="naive")
    with pytest.raises(AssertionError, match=r"wait for ever: .*kind='relay'"):
        run_to_the_end(orders(layout, overlap=False), blocking=("critical", "relay"))


@given(layouts(8, 4, 24), st.booleans())
def test_every_lane_carries_the_messages_of_the_plan_in_its_order(layout, overlap):
    plan, table = layout.plan(), layout.table()
    for rank, events in enumerate(orders(layout, overlap)):
        for direction, what, listed in (
            ("forward", "send", forward_sends),
            ("forward", "post", forward_receives),
            ("backward", "send", backward_sends),
            ("backward", "post", backward_receives),
        ):
            planned = listed(plan, rank, table)
            relayed = [m for m in planned if layout.early_relay and plan.hops[m.hop].relayed]
            for kind, messages in (("critical", planned), ("relay", relayed)):
                assert messages == [
                    message
                    for done, lane, message in events
                    if (done, lane, message.direction) == (what, kind, direction)
                ]


@given(layouts(8, 4, 24), st.booleans(), st.booleans())
def test_what_is_posted_is_waited_for_once(layout, overlap, forward_only):
    for events in orders(layout, overlap, forward_only):
        posted = [event[1:] for event in events if event.what == "post"]
        waited = [event[1:] for event in events if event.what == "wait"]
        assert sorted(posted) == sorted(waited)
        assert len(set(posted)) == len(posted)


def test_a_receive_posted_out_of_order_is_noticed():
    """Two messages of one lane change places on the receiving rank."""
    ranks = orders(Layout(2, 2, 4, 2), overlap=False)
    posts = [i for i, event in enumerate(ranks[0]) if event[:2] == ("post", "critical")]
    first, second = [i for i in posts if ranks[0][i].message.direction == "backward"][:2]
    ranks[0][first], ranks[0][second] = ranks[0][second], ranks[0][first]
    with pytest.raises(AssertionError, match=r"is posted for|wait for ever"):
        run_to_the_end(ranks)
