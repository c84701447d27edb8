"""What is found to be the cause of a failure, and how it is told."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_attnres.training.watching.activity import ENDING, PARTS, SAVING, STARTING, UPDATE
from megatron_attnres.training.watching.diagnosis import (
    SILENT_INTERVALS,
    Diagnosis,
    Observation,
    diagnose,
    report_text,
)
from megatron_attnres.training.watching.rank_record import RankRecord
from tests.training.watching.records import HEARTBEAT, NOW, observation, record, waiting

LOST = {"state": "failed", "error": "PipelineTransferError: receive from rank 2 failed: closed"}


def told(seen: Observation) -> list[str]:
    """The report's lines."""
    hosts = {rank: one.host for rank, one in seen.records.items()}
    return report_text(diagnose(seen), hosts, "--load auto goes on").splitlines()


def suspects(seen: Observation) -> list[int]:
    return [one.rank for one in diagnose(seen).suspects]


def test_a_killed_rank():
    seen = observation(
        record(0, **LOST),
        waiting(1, 2),
        waiting(2, 3, beat=NOW - 8),
        waiting(3, 2),
        processes={2: "gone"},
    )
    found = diagnose(seen)
    assert suspects(seen) == [2] and found.is_certain
    assert found.witnesses == (seen.records[0],)
    assert told(seen) == [
        "training failed in iteration 7",
        "  cause    rank 2 on node0: its process 1002 is gone, last heartbeat 8 s ago in "
        "iteration 7, forward and backward, waiting for receive from rank 3",
        "  seen by  rank 0 on node0, forward and backward: PipelineTransferError: receive from "
        "rank 2 failed: closed",
        "  waiting  2 x receive from rank 2",
        "  next     --load auto goes on",
    ]


def test_a_stopped_rank():
    seen = observation(record(0), record(1, beat=NOW - 8), processes={1: "stopped"})
    assert suspects(seen) == [1]
    assert "rank 1 on node0: its process 1001 is stopped, last heartbeat 8 s ago" in told(seen)[1]


def test_a_rank_that_beats_lives_though_its_process_is_not_to_be_found():
    seen = observation(
        record(0, state="failed", error="ValueError: no", own_fault=True),
        record(1),
        processes={1: "gone"},
    )
    assert suspects(seen) == [0]


def test_a_rank_of_another_host_that_is_silent():
    seen = observation(record(0), record(1), *(record(rank) for rank in range(2, 9)))
    silent = replace(seen.records[8], beat=NOW - SILENT_INTERVALS * HEARTBEAT - 1)
    seen = replace(seen, records=seen.records | {8: silent})
    assert suspects(seen) == [8]
    assert told(seen)[1] == (
        "  cause    rank 8 on node1: dead, stopped or cut off, last heartbeat 16 s ago in "
        "iteration 7, forward and backward"
    )


def test_silence_begins_after_some_heartbeats():
    limit = SILENT_INTERVALS * HEARTBEAT
    assert suspects(observation(record(0, beat=NOW - limit), record(1))) == []
    assert suspects(observation(record(0, beat=NOW - limit - 0.1), record(1))) == [0]


def test_a_silent_node_is_one_line():
    old = NOW - 60
    ranks = [record(rank, beat=old if rank // 8 == 1 else NOW) for rank in range(24)]
    lines = told(observation(*ranks))
    assert lines[1] == (
        "  cause    host node1, all of its 8 ranks; rank 8: dead, stopped or cut off, last "
        "heartbeat 60 s ago in iteration 7, forward and backward"
    )
    assert lines[2] == "  waiting  16 x forward and backward"


def test_half_a_node_is_a_line_for_each_rank():
    ranks = [record(rank, beat=NOW - 60 if 8 <= rank < 12 else NOW) for rank in range(16)]
    causes = [line for line in told(observation(*ranks)) if "cause" in line]
    assert len(causes) == 4
    assert not any("all of its" in line for line in causes)


def test_a_rank_with_an_error_of_its_own():
    own = {"state": "failed", "error": "ValueError: no such thing", "own_fault": True}
    seen = observation(record(0, **LOST), record(1, **own), waiting(2, 1))
    found = diagnose(seen)
    assert suspects(seen) == [1] and found.is_certain
    assert [one.rank for one in found.witnesses] == [0]
    assert told(seen)[1] == "  cause    rank 1 on node0: ValueError: no such thing"


def test_a_rank_that_hangs_while_others_wait():
    seen = observation(record(0, **LOST), waiting(1, 2), record(2, since=NOW - 90), waiting(3, 2))
    assert suspects(seen) == [2] and not diagnose(seen).is_certain
    assert told(seen)[1] == (
        "  cause    rank 2 on node0: alive, but has not got on for 90 s in iteration 7, forward "
        "and backward"
    )


def test_a_rank_that_hangs_before_a_collective_that_others_are_in():
    seen = observation(record(0, part=UPDATE), record(1), record(2, part=UPDATE))
    assert suspects(seen) == [1]


def test_a_rank_that_hangs_an_iteration_behind():
    seen = observation(waiting(0, 1), record(1, iteration=6, part=SAVING), waiting(2, 1))
    assert suspects(seen) == [1]


def test_a_rank_that_left_while_others_wait():
    gone = record(1, iteration=0, part=STARTING, state="ended", beat=NOW - 600)
    lines = told(observation(record(0, iteration=0, part=STARTING, **LOST), gone))
    assert (
        lines[1] == "  cause    rank 1 on node0: ended in order 600 s ago in iteration 0, starting"
    )


def test_ranks_that_have_done_everything_are_not_to_blame():
    ended = {"state": "ended", "part": ENDING, "beat": NOW - 600}
    seen = observation(record(0, **ended), record(1, part=ENDING, **LOST), record(2, **ended))
    assert suspects(seen) == []


def test_a_rank_that_never_started():
    seen = observation(record(0), record(1))
    seen = replace(seen, world_size=3)
    assert suspects(seen) == [2]
    assert told(seen)[1] == "  cause    rank 2 on an unknown host: never said that it runs"


def test_nothing_is_known():
    everyone = observation(*(record(rank) for rank in range(4)))
    assert suspects(everyone) == []
    assert told(everyone)[1:3] == [
        "  cause    perhaps the network between ranks: no rank is silent, behind or failed by "
        "itself",
        "  waiting  4 x forward and backward",
    ]
    assert suspects(observation(*(record(rank, **LOST) for rank in range(4)))) == []


def test_witnesses_come_in_the_order_of_their_errors():
    ranks = [record(rank, beat=NOW - rank, **LOST) for rank in range(3)]
    found = diagnose(observation(*ranks, record(3), processes={3: "gone"}))
    assert [one.rank for one in found.witnesses] == [2, 1, 0]


MANY = 4096
BIG = {
    "nobody started": Observation({}, MANY, NOW, HEARTBEAT, {}),
    "all are silent": observation(*(record(rank, beat=0.0) for rank in range(MANY))),
    "one rank of every host": observation(
        *(record(rank, beat=NOW - 99 * (rank % 8 == 3)) for rank in range(MANY))
    ),
    "all saw it": observation(*(record(rank, **LOST) for rank in range(1, MANY)), record(0)),
    "all have errors of their own": observation(
        *(record(rank, **LOST, own_fault=True) for rank in range(MANY))
    ),
    "all wait for each other": observation(
        *(waiting(rank, rank + 1, **({} if rank % 3 else LOST)) for rank in range(MANY))
    ),
}


@pytest.mark.parametrize("seen", BIG.values(), ids=BIG)
def test_a_report_is_a_screenful(seen):
    lines = told(seen)
    # The stacks' line is added to it.
    assert len(lines) <= 19
    assert lines[-1] == "  next     --load auto goes on"


def test_a_report_counts_what_it_leaves_out():
    lines = told(BIG["one rank of every host"])
    assert lines[7] == "           and 506 more ranks like these"
    lines = told(BIG["all wait for each other"])
    assert sum(line.startswith("           and") for line in lines) == 2


texts = st.text(max_size=30)
moments = st.floats(-1e6, 2e6)


@st.composite
def observations(draw) -> Observation:
    """Anything that ranks may say, sensible or not."""
    world_size = draw(st.integers(1, 6))
    records = {}
    for rank in range(world_size):
        if draw(st.booleans()):
            records[rank] = RankRecord(
                rank,
                draw(st.sampled_from(["a", "b"])),
                draw(st.integers(1, 9)),
                "first",
                draw(moments),
                draw(st.integers(0, 3)),
                draw(st.sampled_from([*PARTS, "of another version"])),
                draw(moments),
                draw(st.none() | texts),
                draw(st.sampled_from(["running", "failed", "ended"])),
                draw(st.none() | texts),
                draw(st.booleans()),
            )
    wrong = draw(st.dictionaries(st.integers(0, world_size - 1), st.just("gone"), max_size=2))
    return Observation(records, world_size, NOW, draw(st.floats(0.01, 60.0)), wrong)


@given(observations())
def test_any_observation_has_a_diagnosis(seen):
    found = diagnose(seen)
    blamed = [one.rank for one in found.suspects]
    assert set(blamed) <= set(range(seen.world_size))
    assert len(blamed) == len(set(blamed))
    assert not set(blamed) & {one.rank for one in found.witnesses}
    assert told(seen)[0] == f"training failed in iteration {found.iteration}"


def test_a_diagnosis_of_nothing_can_be_told():
    lines = report_text(Diagnosis(0, (), False, (), ()), {}, "begins anew").splitlines()
    assert lines[-1] == "  next     begins anew"
