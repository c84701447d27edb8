"""Whether other ranks' processes on this host run, as Linux tells. No torch."""

from collections.abc import Iterable
from pathlib import Path

from megatron_attnres.training.watching.rank_record import RankRecord

_STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "gone", "X": "gone"}


def processes_not_running(
    records: Iterable[RankRecord], host: str, proc: Path = Path("/proc")
) -> dict[int, str]:
    """What is wrong with the processes of the ranks on a host, by rank."""
    if not proc.is_dir():
        return {}
    found = {one.rank: _what_is_wrong(proc / str(one.pid)) for one in records if one.host == host}
    return {rank: wrong for rank, wrong in found.items() if wrong is not None}


def _what_is_wrong(process: Path) -> str | None:
    try:
        content = (process / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except OSError:  # says nothing about the process
        return None
    # The name, in brackets, may hold anything; the state follows it.
    return _STATES.get(content.rpartition(b")")[2].decode("ascii", "replace").strip()[:1])
