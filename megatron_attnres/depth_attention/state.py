"""What flows through depth instead of one hidden state."""

from typing import NamedTuple, Self

from torch import Tensor

from megatron_attnres.depth_attention.phase_one import Attended


class ReadAhead(NamedTuple):
    """What phase 1 found for one sublayer of the block being computed.

    Attributes:
        attended: the sublayer's mixture of the completed summaries, and its denominator.
        direction: u, pseudo-query times key-norm weight, [h], float32 or wider.
    """

    attended: Attended
    direction: Tensor


class DepthState(NamedTuple):
    """The sources that exist at one point of the model's depth.

    Attributes:
        sources: b_0 (the token embedding) and every completed block summary, oldest first, each
            [s, b, h] (s / TP under sequence parallelism). Empty in baseline mode.
        partial: the partial sum of the block being computed, or None at a block's start. In
            baseline mode this is the residual stream itself.
        inverse_rms: 1 / rms of every token, [s x b], of the oldest sources: as many as were read.
            Numbers of Python's where a single token is decoded.
        ahead: of the coming sublayers of the block, in order: as many as phase 1 has served.
    """

    sources: tuple[Tensor, ...]
    partial: Tensor | None
    inverse_rms: tuple[Tensor | float, ...] = ()
    ahead: tuple[ReadAhead, ...] = ()

    def readable(self) -> tuple[Tensor, ...]:
        """The sources that the next sublayer reads (DESIGN section 2), newest last."""
        return self.sources if self.partial is None else (*self.sources, self.partial)

    def add(self, output: Tensor, *, ends_block: bool, cumulative: bool = False) -> Self:
        """The state after a sublayer.

        Args:
            output: the sublayer's output, of the sources' shape.
            ends_block: whether the sublayer is the last of its block (or of the model).
            cumulative: continue the running hidden state, whose value at the last block's end is
                the newest source, instead of starting every block's sum from nothing.
        """
        start = self.partial
        if start is None and cumulative:
            start = self.sources[-1]
        total = output if start is None else start + output
        if ends_block:
            return type(self)((*self.sources, total), None, self.inverse_rms)
        return type(self)(self.sources, total, self.inverse_rms, self.ahead[1:])
