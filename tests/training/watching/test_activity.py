"""What a rank says that it does, and how its time is divided."""

import subprocess
import sys
import time

import pytest
import torch

from megatron_attnres.pipeline.waiting import WaitClock
from megatron_attnres.training.watching.activity import (
    FORWARD_BACKWARD,
    MAY_TAKE_LONG,
    PARTS,
    SAVING,
    STARTING,
    UPDATE,
    Activity,
)
from tests.training.command import ROOT


@pytest.fixture
def activity():
    return Activity(lambda: None)


def test_it_starts_with_starting(activity):
    assert (activity.iteration, activity.part, activity.waiting_for) == (0, STARTING, None)
    assert abs(time.time() - activity.since) < 10


def test_parts_are_named_and_timed(activity):
    activity.begin(3)
    with activity.doing(FORWARD_BACKWARD):
        assert activity.part == FORWARD_BACKWARD
        time.sleep(0.02)
    with activity.doing(UPDATE):
        assert activity.part == UPDATE
    assert activity.iteration == 3
    assert activity.seconds[FORWARD_BACKWARD] >= 0.02 > activity.seconds[UPDATE] >= 0


def test_a_part_that_runs_twice_is_summed_and_the_next_iteration_begins_anew(activity):
    activity.begin(1)
    for _ in range(2):
        with activity.doing(SAVING):
            time.sleep(0.01)
    assert activity.seconds[SAVING] >= 0.02
    activity.begin(2)
    assert activity.seconds == {}


def test_a_part_ends_when_the_device_has_done_its_work():
    activity = Activity(lambda: time.sleep(0.02))
    with activity.doing(UPDATE):
        pass
    assert activity.seconds[UPDATE] >= 0.02


def test_an_error_leaves_the_part_that_it_came_from(activity):
    with pytest.raises(ValueError), activity.doing(UPDATE):
        raise ValueError
    assert activity.part == UPDATE
    assert UPDATE not in activity.seconds


def test_getting_on_is_noted(activity):
    for get_on in (activity.get_on, lambda: activity.begin(1), activity.doing(UPDATE).__enter__):
        activity.since = 0.0
        get_on()
        assert activity.since > 0


def test_it_tells_what_the_rank_waits_for(activity):
    activity.waits = WaitClock(torch.device("cpu"))
    assert activity.waiting_for is None
    with activity.waits.waiting("rank 3"):
        assert activity.waiting_for == "rank 3"


def test_parts_that_may_take_long_are_parts():
    assert set(MAY_TAKE_LONG) < set(PARTS)


def test_what_reads_heartbeats_needs_no_torch():
    modules = (
        "activity",
        "alarms",
        "diagnosis",
        "events",
        "processes",
        "rank_record",
        "stragglers",
    )
    imports = "; ".join(f"import megatron_attnres.training.watching.{one}" for one in modules)
    code = f"{imports}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
