"""How the pipeline schedule runs. Plain data, no torch."""

from dataclasses import dataclass
from typing import Literal

from megatron_attnres.pipeline.plan import Policy

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class ScheduleConfig:
    """How the pipeline schedule runs.

    Attributes:
        microbatch_group_size: contiguous micro-batches of one virtual stage.
        overlap_p2p: post receives ahead of compute (interleaved schedule).
        recompute: activations computed again in backward.
        policy: what hops carry.
        early_relay: send received entries on before the chunk computes, on lanes of their own.
    """

    microbatch_group_size: int
    overlap_p2p: bool
    recompute: Recompute
    policy: Policy = "cached"
    early_relay: bool = True
