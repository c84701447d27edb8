"""How a run of a sweep stands, from its folder, its starts and the queue. Pure, no torch.

A run has ``failed`` where it gave a reason itself, which another start would meet again: bad input,
too many skipped updates, an exception, a crash. It was ``interrupted`` where something else ended
it: a signal that stopped or killed it, a machine that is gone. Then another start goes on. It was
``dropped`` where the grid no longer has it.
"""

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from megatron_attnres.errors import EXIT_STATUS_BAD_INPUT
from megatron_attnres.training.sweeps.launching.launches import Launch
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.watching.run_contents import RunContents
from megatron_attnres.training.watching.run_state import ENDED, RunState, state_of

StandingWord = Literal["finished", "running", "waiting", "interrupted", "failed", "dropped"]
STANDING_WORDS: tuple[StandingWord, ...] = get_args(StandingWord)

# Sent by the system for what the process itself did.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
ERROR_CHARACTERS = 400
# As examples/slurm/after_run.sh says that it is the last word.
NOT_REQUEUED = "not requeued"
# What Slurm adds to what a run prints.
BATCH_WORDS = ("[job]", "srun: ", "slurmstepd: ")
# Goes before a run's one line about bad input.
COMPLAINT = "pretrain_attnres.py: "
# Of squeue: the job has processes, or is about to.
QUEUE_RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "STOPPED", "SUSPENDED", "STAGE_OUT")


@dataclass(frozen=True)
class Evidence:
    """What is known of a run.

    Attributes:
        contents: of its folder.
        launches: all starts by the launcher, the oldest first.
        last_words: last lines that the newest start printed.
        is_held: processes of a job on this machine hold the run's lock.
        queue_state: of its Slurm job, as squeue names it; None if the queue does not have it.
        host: where this was looked up.
    """

    contents: RunContents
    launches: Sequence[Launch] = ()
    last_words: Sequence[str] = ()
    is_held: bool = False
    queue_state: str | None = None
    host: str = ""


@dataclass(frozen=True)
class Standing:
    """How a run stands.

    Attributes:
        run: the plan.
        word: see the module.
        state: figures of its folder; its own ``state`` knows nothing of locks and queues.
        error: of a run that failed, one line.
        ended_by: what ended one that was interrupted, one line.
        lost_its_end: the last iteration is saved, its validation loss is not: the job was killed
            between the two, and another start has nothing left to do.
        launch: the newest start.
    """

    run: PlannedRun
    word: StandingWord
    state: RunState
    error: str | None = None
    ended_by: str | None = None
    lost_its_end: bool = False
    launch: Launch | None = None

    @property
    def flops_done(self) -> float:
        """Of the training, without validation."""
        done = min(self.state.iteration or 0, self.run.train_iters)
        return self.run.flops * done / self.run.train_iters


def standing_of(run: PlannedRun, evidence: Evidence, now: float) -> Standing:
    """How a run stands. Pure.

    Args:
        run: the plan.
        evidence: what is known.
        now: seconds since the epoch.
    """
    state = state_of(run.name, evidence.contents, now)
    launch = evidence.launches[-1] if evidence.launches else None
    if _runs(evidence, launch, state):
        return Standing(run, "running", state, launch=launch)
    # A run that gave up at its last iteration has done all of them.
    if is_complete(run, state) and state.state != "gave up":
        return Standing(run, "finished", state, launch=launch)
    if evidence.queue_state is not None or (launch is None and state.state == "not started"):
        return Standing(run, "waiting", state, launch=launch)
    error = _error(run, evidence, launch, state)
    if error is not None:
        return Standing(run, "failed", state, error, launch=launch)
    lost_its_end = (state.checkpoint_iteration or 0) >= run.train_iters
    ended_by = _ended_by(launch, state)
    return Standing(run, "interrupted", state, None, ended_by, lost_its_end, launch)


def with_dropped(standings: Sequence[Standing], dropped: Collection[str]) -> list[Standing]:
    """The same, where runs that the grid no longer has, and that did not finish, say so. Pure.

    Args:
        standings: of a sweep.
        dropped: names of the runs that the newest grid does not have.
    """
    return [
        replace(one, word="dropped")
        if one.run.name in dropped and one.word in ("waiting", "interrupted", "failed")
        else one
        for one in standings
    ]


def is_complete(run: PlannedRun, state: RunState) -> bool:
    """All iterations are done, with the validation loss of the last one if the run validates."""
    validated = "eval-interval" not in run.flags or (
        (state.validation_iteration or 0) >= run.train_iters
    )
    return (state.iteration or 0) >= run.train_iters and validated


def _runs(evidence: Evidence, launch: Launch | None, state: RunState) -> bool:
    if evidence.is_held or evidence.queue_state in QUEUE_RUNNING:
        return True
    # Here a lock that is free is the better witness: ranks that were killed still look alive for a
    # minute. Of other machines and of starts by hand there are only the ranks' heartbeats.
    is_ours = launch is not None and launch.host == evidence.host
    return not is_ours and state.state == "running"


def _error(
    run: PlannedRun, evidence: Evidence, launch: Launch | None, state: RunState
) -> str | None:
    """Why the run itself ended, in one line; None where something else ended it."""
    status = launch.status if launch is not None else None
    if status is None:
        return _own_verdict(evidence, launch)
    number = _signal_of(status)
    if number in CRASHES:
        return f"crashed ({number.name}); see {evidence.contents.folder.path / launch.log}"
    if number is not None:
        return None
    if status != 0:
        return _reason(evidence, launch, status)
    if (state.iteration or 0) >= run.train_iters:
        return "all iterations are done, but none has a validation loss; see --split, --eval-iters"
    return None


def _signal_of(status: int) -> signal.Signals | None:
    """The signal that ended a process, or a rank of it, which the job reports as shells do."""
    number = -status if status < 0 else status - 128
    return signal.Signals(number) if number in set(signal.Signals) else None


def _own_verdict(evidence: Evidence, launch: Launch | None) -> str | None:
    """Where no exit status is known: what the run's events or the batch script say."""
    said = next((line for line in reversed(evidence.last_words) if line.startswith("[job]")), "")
    if NOT_REQUEUED in said:
        return _reason(evidence, launch, None)
    courses = [one for one in _events_since(evidence, launch) if one["kind"] in ("start", *ENDED)]
    if courses and courses[-1]["kind"] in ("failure", "gave up"):
        return _reason(evidence, launch, None)
    return None


def _reason(evidence: Evidence, launch: Launch | None, status: int | None) -> str:
    """What the newest start said of its failure: its report, else its last line."""
    verdicts = [
        one["message"]
        for one in _events_since(evidence, launch)
        if one["kind"] in ("failure", "gave up")
    ]
    if verdicts and status != EXIT_STATUS_BAD_INPUT:
        return _one_line(verdicts[-1].splitlines())
    printed = [line for line in evidence.last_words if not line.startswith(BATCH_WORDS)]
    complaints = [line for line in printed if COMPLAINT in line]
    if printed:
        return _one_line([[*printed, *complaints][-1].rpartition(COMPLAINT)[2]])
    return f"ended with status {status} and said nothing"


def _events_since(evidence: Evidence, launch: Launch | None) -> list[dict]:
    begin = launch.time if launch is not None else 0.0
    return [one for one in evidence.contents.events if one["time"] >= begin]


def _one_line(lines: Sequence[str]) -> str:
    """A report's headline and causes; what comes next in it is advice for a single run."""
    kept = [" ".join(line.split()) for line in lines if not line.strip().startswith("next ")]
    return "; ".join(kept)[:ERROR_CHARACTERS]


def _ended_by(launch: Launch | None, state: RunState) -> str:
    number = _signal_of(launch.status) if launch is not None and launch.status else None
    if number is not None:
        return f"ended by {number.name}"
    return "stopped in order" if state.state == "stopped" else "lost"
