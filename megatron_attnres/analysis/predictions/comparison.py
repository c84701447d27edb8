"""What the ways of carrying the payload cost: one row each, for people and for programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron_attnres.analysis.predictions.outcomes import (
    Job,
    Outcome,
    job_of,
    outcomes_of,
    without_communication,
)
from megatron_attnres.analysis.predictions.scenario import Scenario
from megatron_attnres.analysis.predictions.sizes import size_text
from megatron_attnres.pipeline.plan import Policy, largest_hop, total_entries
from megatron_attnres.pipeline.simulator.workload import Payload, Workload

ComparedMode = Literal["block", "full"]

STANDARD = Payload(None)
DIRECTIONS = 2


_LEGEND = (
    "overhead: over standard residuals; exposed: beyond a step whose transfers take no time;",
    "bubble: of that step; entries: per micro-batch, forward; sent: by a pipeline in a step, both",
    "ways; held: most sources and partial sums on a rank at once",
)


@dataclass(frozen=True)
class PredictedStep:
    """One payload's step.

    Attributes:
        mode: ``baseline`` is standard residuals.
        policy: what hops carry; None for standard residuals.
        early_relay: whether received sources go on before the chunk computes.
        step_seconds: predicted.
        tokens_per_second: over all data-parallel pipelines; None where tokens are unknown.
        bubble_fraction: share of the step without communication in which a stage does not compute,
            mean of the stages.
        exposed_seconds: what the step takes beyond the step without communication.
        overhead: step time over that of standard residuals, less 1.
        entries: per micro-batch, forward.
        bytes_per_step: that one pipeline sends, both directions, on one of its TP ranks.
        largest_hop: entries of the fullest hop.
        peak_summary_bytes: most that a rank holds of sources and partial sums at once.
    """

    mode: str
    policy: Policy | None
    early_relay: bool
    step_seconds: float
    tokens_per_second: float | None
    bubble_fraction: float
    exposed_seconds: float
    overhead: float
    entries: int
    bytes_per_step: int
    largest_hop: int
    peak_summary_bytes: int

    @property
    def name(self) -> str:
        """For a table."""
        if self.policy is None:
            return "standard residuals"
        return f"{self.mode}, {self.policy}{', early relay' if self.early_relay else ''}"


def payloads_of(scenario: Scenario, modes: Sequence[ComparedMode]) -> list[Payload]:
    """Standard residuals, then every policy of every mode."""
    block_sizes = {"block": scenario.block_size, "full": 1}
    return [STANDARD] + [
        Payload(block_sizes[mode], policy, early_relay)
        for mode in modes
        for policy in ("naive", "cached")
        for early_relay in (False, True)
    ]


def compare(scenario: Scenario, modes: Sequence[ComparedMode]) -> list[PredictedStep]:
    """A row per payload, standard residuals first.

    Raises:
        InputError: Megatron-Core's schedule does not take the sizes.
    """
    payloads = payloads_of(scenario, modes)
    names = ["baseline"] + [mode for mode in modes for _ in range(4)]
    jobs = [job_of(scenario, payload) for payload in payloads]
    outcomes = outcomes_of([*jobs, *map(without_communication, jobs)])
    standard = outcomes[jobs[0]].seconds
    return [
        _row(scenario, mode, job, outcomes, standard) for mode, job in zip(names, jobs, strict=True)
    ]


def _row(
    scenario: Scenario,
    mode: str,
    job: Job,
    outcomes: dict[Job, Outcome],
    standard_seconds: float,
) -> PredictedStep:
    hops = job.workload.plan(job.payload).hops
    seconds, peak_entries = outcomes[job]
    free_seconds = outcomes[without_communication(job)].seconds
    entries, entry_bytes = total_entries(hops), scenario.entry_bytes
    tokens = scenario.tokens_per_step
    return PredictedStep(
        mode=mode,
        policy=None if job.payload == STANDARD else job.payload.policy,
        early_relay=job.payload.early_relay,
        step_seconds=seconds,
        tokens_per_second=None if tokens is None else tokens / seconds,
        bubble_fraction=1 - _mean_compute_seconds(job.workload) / free_seconds,
        exposed_seconds=seconds - free_seconds,
        overhead=seconds / standard_seconds - 1,
        entries=entries,
        bytes_per_step=DIRECTIONS * entries * scenario.num_microbatches * entry_bytes,
        largest_hop=largest_hop(hops),
        peak_summary_bytes=peak_entries * entry_bytes,
    )


def _mean_compute_seconds(workload: Workload) -> float:
    """Of a stage in a step."""
    per_microbatch = sum(workload.forward_seconds) + sum(workload.backward_seconds)
    return per_microbatch * workload.schedule.num_microbatches / workload.schedule.pipeline_size


def as_json(rows: Sequence[PredictedStep]) -> list[dict[str, Any]]:
    """For programs."""
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[PredictedStep]) -> str:
    """For a terminal."""
    with_tokens = rows[0].tokens_per_second is not None
    tokens = f"{'tokens/s':>12}" if with_tokens else ""
    lines = [
        f"{'':<28}{'step ms':>11}{'overhead':>10}{'exposed ms':>12}{'bubble':>8}{tokens}"
        f"{'entries':>9}{'largest hop':>13}{'sent':>11}{'held':>11}"
    ]
    for row in rows:
        tokens = f"{row.tokens_per_second:>12,.0f}" if with_tokens else ""
        lines.append(
            f"{row.name:<28}{row.step_seconds * 1e3:>11,.2f}{row.overhead:>10.2%}"
            f"{row.exposed_seconds * 1e3:>12,.2f}{row.bubble_fraction:>8.2%}{tokens}"
            f"{row.entries:>9,}{row.largest_hop:>13,}{size_text(row.bytes_per_step):>11}"
            f"{size_text(row.peak_summary_bytes):>11}"
        )
    return "\n".join([*lines, *_LEGEND])
