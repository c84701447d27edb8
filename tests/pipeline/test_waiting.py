"""How long a rank stands still, on the CPU."""

import time

import pytest
import torch

from megatron_attnres.pipeline.waiting import WaitClock


@pytest.fixture
def waits():
    return WaitClock(torch.device("cpu"))


def test_waits_add_up_until_they_are_taken(waits):
    assert waits.take_seconds() == 0
    for _ in range(2):
        with waits.waiting("rank 1"):
            time.sleep(0.01)
    time.sleep(0.05)
    seconds = waits.take_seconds()
    assert 0.02 <= seconds < 0.06, "what runs outside is no wait"
    assert waits.take_seconds() == 0


def test_the_wait_that_goes_on_is_named(waits):
    assert waits.current is None
    with waits.waiting("rank 1"):
        assert waits.current == "rank 1"
    assert waits.current is None


def test_a_wait_that_fails_stays_named(waits):
    with pytest.raises(RuntimeError), waits.waiting("rank 1"):
        raise RuntimeError
    assert waits.current == "rank 1"
    with waits.waiting("rank 2"):
        pass
    assert waits.current is None
