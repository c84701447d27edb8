"""From what all ranks said of themselves to what went wrong. Pure: no files, no clock, no torch."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_attnres.training.watching.activity import ENDING, PARTS
from megatron_attnres.training.watching.rank_record import RankRecord

# A rank that has said nothing for so many intervals of its heartbeat is dead, stopped or cut off.
SILENT_INTERVALS = 3
GONE_INTERVALS = 1.5
# Of each part of a report.
MOST_CAUSES = 6
MOST_LINES = 4


@dataclass(frozen=True)
class Observation:
    """What the reporting rank can see of the others.

    Attributes:
        records: of this start, by rank; a rank that never wrote one is missing.
        world_size: ranks of the job.
        now: seconds since the epoch.
        heartbeat_seconds: between two records of a rank.
        processes: of ranks on the reporting rank's own host: what the system says of the process
            ("gone", "stopped"), for those that do not run.
    """

    records: Mapping[int, RankRecord]
    world_size: int
    now: float
    heartbeat_seconds: float
    processes: Mapping[int, str]


@dataclass(frozen=True)
class Suspect:
    """A rank that the failure came from, and why it is thought so."""

    rank: int
    host: str
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """What went wrong.

    Attributes:
        iteration: in which it showed.
        suspects: where it came from; empty if nothing tells.
        is_certain: suspects are silent or failed by themselves. Otherwise they are only behind, as
            a rank may be that has just died and has not been silent for long enough.
        witnesses: errors of other ranks, the earliest first.
        waiting: ranks that stood still, by what they did.
    """

    iteration: int
    suspects: tuple[Suspect, ...]
    is_certain: bool
    witnesses: tuple[RankRecord, ...]
    waiting: tuple[tuple[str, int], ...]


def diagnose(seen: Observation) -> Diagnosis:
    """Silent ranks are to blame first, then those with errors of their own, then those behind."""
    silent = _silent(seen)
    records = {rank: one for rank, one in seen.records.items() if rank not in silent}
    suspects = [_silent_suspect(seen, rank) for rank in silent]
    if not suspects:
        suspects = [
            Suspect(one.rank, one.host, one.error or "")
            for one in records.values()
            if one.own_fault
        ]
    is_certain = bool(suspects)
    if not suspects:
        suspects = _behind(records, seen.now)
    blamed = {suspect.rank for suspect in suspects}
    witnesses = sorted(
        (one for one in records.values() if one.error and one.rank not in blamed),
        key=lambda one: one.beat,
    )
    waiting = Counter(
        one.waiting_for or one.part
        for one in records.values()
        if one.state == "running" and one.rank not in blamed
    )
    return Diagnosis(
        max((one.iteration for one in seen.records.values()), default=0),
        tuple(suspects),
        is_certain,
        tuple(witnesses),
        tuple(waiting.most_common()),
    )


def report_text(diagnosis: Diagnosis, hosts: Mapping[int, str], goes_on: str) -> str:
    """The report, a screenful at most.

    Args:
        diagnosis: what is known.
        hosts: of the ranks that were seen.
        goes_on: what the next start will do.
    """
    lines = [f"training failed in iteration {diagnosis.iteration}", *_causes(diagnosis, hosts)]
    lines += [
        f"  seen by  rank {one.rank} on {one.host}, {one.part}: {one.error}"
        for one in diagnosis.witnesses[:MOST_LINES]
    ]
    lines += _more(len(diagnosis.witnesses[MOST_LINES:]), "ranks saw it")
    lines += [f"  waiting  {count} x {what}" for what, count in diagnosis.waiting[:MOST_LINES]]
    lines += _more(sum(count for _, count in diagnosis.waiting[MOST_LINES:]), "ranks for others")
    return "\n".join([*lines, f"  next     {goes_on}"])


def _causes(diagnosis: Diagnosis, hosts: Mapping[int, str]) -> list[str]:
    """A line per suspect, or per host all of whose ranks are suspects."""
    by_host: dict[str, list[Suspect]] = defaultdict(list)
    for suspect in diagnosis.suspects:
        by_host[suspect.host].append(suspect)
    ranks_on = Counter(hosts.values())
    causes: list[tuple[str, int]] = []
    for host, suspects in by_host.items():
        if 1 < len(suspects) == ranks_on[host]:
            first = suspects[0]
            what = f"host {host}, all of its {len(suspects)} ranks; rank {first.rank}: {first.why}"
            causes.append((what, len(suspects)))
        else:
            causes += [(f"rank {one.rank} on {host}: {one.why}", 1) for one in suspects]
    if not causes:
        return [
            "  cause    perhaps the network between ranks: no rank is silent, behind or failed by "
            "itself"
        ]
    lines = [f"  cause    {what}" for what, _ in causes[:MOST_CAUSES]]
    return lines + _more(sum(count for _, count in causes[MOST_CAUSES:]), "ranks like these")


def _more(count: int, what: str) -> list[str]:
    return [f"           and {count} more {what}"] if count else []


def _silent(seen: Observation) -> list[int]:
    return [rank for rank in range(seen.world_size) if _is_silent(seen, rank)]


def _is_silent(seen: Observation, rank: int) -> bool:
    """It has said nothing for long, or for a while and its process does not run, or never."""
    one = seen.records.get(rank)
    if one is None:
        return True
    # A process that is not to be found may live in another container: its heartbeat counts more.
    intervals = GONE_INTERVALS if rank in seen.processes else SILENT_INTERVALS
    return one.state == "running" and seen.now - one.beat > intervals * seen.heartbeat_seconds


def _silent_suspect(seen: Observation, rank: int) -> Suspect:
    one = seen.records.get(rank)
    if one is None:
        return Suspect(rank, "an unknown host", "never said that it runs")
    process = seen.processes.get(rank)
    what = f"its process {one.pid} is {process}" if process else "dead, stopped or cut off"
    ago = f"last heartbeat {seen.now - one.beat:.0f} s ago"
    return Suspect(rank, one.host, f"{what}, {ago} in iteration {one.iteration}, {_doing(one)}")


def _behind(records: Mapping[int, RankRecord], now: float) -> list[Suspect]:
    """Ranks that wait for no transfer and are behind all that do: they hang, or left the job."""
    progress = {rank: (one.iteration, _place(one.part)) for rank, one in records.items()}
    if not progress or (len(set(progress.values())) == 1 and _nobody_waits(records.values())):
        return []
    last = min(progress.values())
    return [
        Suspect(rank, one.host, _why_behind(one, now))
        for rank, one in records.items()
        if progress[rank] == last and one.waiting_for is None and not _is_excused(one)
    ]


def _why_behind(one: RankRecord, now: float) -> str:
    where = f"in iteration {one.iteration}, {one.part}"
    if one.state == "ended":
        return f"ended in order {now - one.beat:.0f} s ago {where}"
    return f"alive, but has not got on for {now - one.since:.0f} s {where}"


def _nobody_waits(records: Iterable[RankRecord]) -> bool:
    return all(one.waiting_for is None and one.error is None for one in records)


def _is_excused(one: RankRecord) -> bool:
    """It waited for somebody, as its error tells, or has done all that there was to do."""
    if one.state == "ended":
        return one.part == ENDING
    return one.state == "failed" and not one.own_fault


def _place(part: str) -> int:
    return PARTS.index(part) if part in PARTS else 0


def _doing(one: RankRecord) -> str:
    return f"{one.part}, waiting for {one.waiting_for}" if one.waiting_for else one.part
