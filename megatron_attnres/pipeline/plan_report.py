"""A pipeline plan in numbers: per hop and in total, for people (a table) and programs (JSON)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_attnres.pipeline.plan import (
    PipelinePlan,
    least_entries,
    paper_counts,
    total_entries,
)

HOP_COLUMNS = ("from", "to", "naive", "cached", "critical", "relayed", "partial")


@dataclass(frozen=True)
class EntrySize:
    """What one entry weighs: s x b x h elements, s / TP of them under sequence parallelism."""

    seq_length: int
    micro_batch_size: int
    hidden_size: int
    bytes_per_element: int
    sequence_shards: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of one entry."""
        tokens = self.seq_length // self.sequence_shards * self.micro_batch_size
        return tokens * self.hidden_size * self.bytes_per_element


def plan_report(plan: PipelinePlan, entry: EntrySize | None = None) -> dict[str, Any]:
    """Counts of one micro-batch in the forward direction; the backward direction mirrors them.

    Args:
        plan: a layout; both policies are reported whatever its own.
        entry: adds bytes.
    """
    naive, cached = replace(plan, policy="naive"), replace(plan, policy="cached")
    hops = [
        {
            "from": one.index,
            "to": one.index + 1,
            "naive": one.entries,
            "cached": other.entries,
            "critical": other.critical_entries,
            "relayed": len(other.relayed),
            "partial": other.partial,
        }
        for one, other in zip(naive.hops, cached.hops, strict=True)
    ]
    report: dict[str, Any] = {"hops": hops, "totals": _totals(naive, cached)}
    if entry is not None:
        report["entry_bytes"] = entry.bytes
        for hop in hops:
            hop["naive_bytes"] = hop["naive"] * entry.bytes
            hop["cached_bytes"] = hop["cached"] * entry.bytes
        totals = report["totals"]
        report["total_bytes"] = {name: totals[name] * entry.bytes for name in ("naive", "cached")}
    return report


def _totals(naive: PipelinePlan, cached: PipelinePlan) -> dict[str, float | None]:
    """All counts; the paper's equations have none for the baseline, which has no blocks."""
    paper_naive = paper_cached = None
    if cached.block_size is not None:
        blocks = -(-cached.num_sublayers // cached.block_size)
        paper_naive, paper_cached = paper_counts(blocks, cached.pipeline_size, cached.virtual_size)
    return {
        "naive": total_entries(naive.hops),
        "cached": total_entries(cached.hops),
        "critical": sum(hop.critical_entries for hop in cached.hops),
        "relayed": sum(len(hop.relayed) for hop in cached.hops),
        "lower_bound": least_entries(cached),
        "standard_residual": len(cached.hops),
        "paper_eq7": paper_naive,
        "paper_eq8": paper_cached,
    }


def as_table(report: dict[str, Any], plan: PipelinePlan) -> str:
    """The report for a terminal."""
    return "\n".join(
        (*_chunk_lines(plan), "", *_hop_lines(report["hops"]), "", *_total_lines(report))
    )


def _chunk_lines(plan: PipelinePlan) -> Iterator[str]:
    yield "chunk  rank  stage  layers     available     completes"
    for chunk in plan.chunks:
        layers = f"{chunk.layers[0]}-{chunk.layers[-1]}" if chunk.layers else "none"
        yield (
            f"{chunk.index:>5}  {chunk.rank:>4}  {chunk.virtual_stage:>5}  {layers:<9}  "
            f"{_sources(chunk.available):<12}  {_sources(chunk.produced)}"
        )


def _hop_lines(hops: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "entries per micro-batch, forward"
    yield "  hop      naive  cached  of these: critical  relayed  partial sum"
    for hop in hops:
        name = f"{hop['from']}-{hop['to']}"
        yield (
            f"  {name:<7}  {hop['naive']:>5}  {hop['cached']:>6}  {hop['critical']:>18}  "
            f"{hop['relayed']:>7}  {'yes' if hop['partial'] else 'no'}"
        )


def _total_lines(report: dict[str, Any]) -> Iterator[str]:
    names = {
        "naive": "naive",
        "cached": "cached",
        "critical": "  critical",
        "relayed": "  relayed",
        "lower_bound": "least possible",
        "standard_residual": "standard residuals",
        "paper_eq7": "paper, equation 7",
        "paper_eq8": "paper, equation 8",
    }
    for name, count in report["totals"].items():
        if count is None:
            continue
        size = f"{count * report['entry_bytes']:>18,.0f} bytes" if "entry_bytes" in report else ""
        yield f"{names[name]:<20}{count:>9g} entries{size}"


def _sources(indices: Sequence[int]) -> str:
    if not indices:
        return "-"
    first, last = f"b{indices[0]}", f"b{indices[-1]}"
    return first if first == last else f"{first}..{last}"
