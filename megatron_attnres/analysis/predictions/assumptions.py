"""What a prediction rests on, value by value, and where each came from. Plain data, no torch."""

import argparse
from typing import Any, Literal, NamedTuple

Origin = Literal["given", "default", "derived", "profile", "fixed"]

DEFAULTS: dict[str, Any] = {
    "precision": "bf16",
    "sequence_parallel": False,
    "overlap_p2p_communication": True,
    "depth_attention_share": 0.0,
    "recompute_granularity": "none",
    "latency_between_nodes": 10.0,
    "latency_inside_node": 5.0,
    "ranks_per_node": 8,
    "data_parallel_size": 1,
    "share_link": True,
}


class Assumption(NamedTuple):
    """One number or choice.

    Attributes:
        value: what was taken.
        unit: of the value; empty for none.
        origin: a flag, a flag's default, arithmetic from flags, a profile, or the
            simulation itself.
    """

    value: Any
    unit: str
    origin: Origin


class Assumptions(dict[str, Assumption]):
    """By name, in the order in which they were taken."""

    def take(self, arguments: argparse.Namespace, name: str, unit: str = "") -> Any:
        """A flag's value, or else its default."""
        value = getattr(arguments, name)
        given = value is not None
        value = value if given else DEFAULTS[name]
        self[name] = Assumption(value, unit, "given" if given else "default")
        return value

    def note(self, name: str, value: Any, unit: str = "", origin: Origin = "derived") -> None:
        """Keep what did not come from a flag of this name."""
        self[name] = Assumption(value, unit, origin)

    def as_json(self) -> dict[str, dict[str, Any]]:
        """For programs."""
        return {name: one._asdict() for name, one in self.items()}

    def lines(self) -> list[str]:
        """For a terminal."""
        width = max(map(len, self), default=0)
        return ["assumptions"] + [
            f"  {name.replace('_', ' '):<{width}}  {_text(one)}" for name, one in self.items()
        ]


def _text(assumption: Assumption) -> str:
    value, unit, origin = assumption
    if isinstance(value, bool):
        value = "yes" if value else "no"
    elif isinstance(value, float):
        value = f"{value:,.6g}"
    elif isinstance(value, int):
        value = f"{value:,}"
    source = "" if origin in ("given", "fixed") else f" ({origin})"
    return f"{value} {unit}".rstrip() + source
