"""What ranks say of themselves, for tests."""

from dataclasses import replace

from megatron_attnres.training.watching.activity import FORWARD_BACKWARD
from megatron_attnres.training.watching.diagnosis import Observation
from megatron_attnres.training.watching.rank_record import RankRecord

NOW = 1_000_000.0
HEARTBEAT = 5.0


def record(rank: int, **changed) -> RankRecord:
    """Of a rank that is well, in iteration 7; eight ranks share a host."""
    well = RankRecord(
        rank=rank,
        host=f"node{rank // 8}",
        pid=1000 + rank,
        attempt="first",
        beat=NOW - 2,
        iteration=7,
        part=FORWARD_BACKWARD,
        since=NOW - 4,
    )
    return replace(well, **changed)


def waiting(rank: int, peer: int, **changed) -> RankRecord:
    """Of a rank that waits for another one."""
    return record(rank, waiting_for=f"receive from rank {peer}", **changed)


def observation(*records: RankRecord, processes: dict[int, str] | None = None) -> Observation:
    """Of a job of as many ranks as there are records."""
    return Observation(
        {one.rank: one for one in records}, len(records), NOW, HEARTBEAT, processes or {}
    )
