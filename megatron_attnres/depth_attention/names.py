"""Names of the implementations. No torch: configurations read them before it is loaded."""

from typing import Literal

OperatorName = Literal["auto", "two-phase", "fused", "plain"]
