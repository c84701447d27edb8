"""The curves of a grid: its modes, and in block mode one for each number of blocks. Pure."""

import math
from dataclasses import dataclass
from typing import Any

from megatron_attnres.model.configuration import AttnResConfig, AttnResMode


@dataclass(frozen=True)
class Curve:
    """What is compared over the sizes.

    Attributes:
        mode: of the residual connections.
        num_blocks: N asked for, in block mode.
    """

    mode: AttnResMode
    num_blocks: int | None = None

    @property
    def name(self) -> str:
        """``baseline``, ``block4``, ``full``."""
        return self.mode if self.num_blocks is None else f"{self.mode}{self.num_blocks}"

    def attn_res(self, num_sublayers: int) -> AttnResConfig:
        """The mode and S for a model's L sublayers, as far as they say what a run costs."""
        if self.num_blocks is None:
            return AttnResConfig(self.mode, 1)
        return AttnResConfig(self.mode, math.ceil(num_sublayers / self.num_blocks))

    def flags(self, num_sublayers: int) -> dict[str, Any]:
        """Flags of pretrain_attnres.py.

        Where L sublayers cannot be cut into N blocks of equal size, as 26 into 8, the flag that
        asks for N is refused; then the curve takes blocks of ceil(L / N) sublayers, fewer than N,
        as pretrain_attnres.py does where it is given neither flag.
        """
        flags: dict[str, Any] = {"attn-res-mode": self.mode}
        if self.num_blocks is None:
            return flags
        size = self.attn_res(num_sublayers).block_size
        can_be_cut = math.ceil(num_sublayers / size) == self.num_blocks
        # More blocks than sublayers are left to pretrain_attnres.py to refuse.
        if can_be_cut or self.num_blocks > num_sublayers:
            return flags | {"attn-res-num-blocks": self.num_blocks}
        return flags | {"attn-res-block-size": size}
