"""Autograd nodes at a chunk's edges: they bring together the gradients that one source gets.

The gradient of a source comes from the chunk itself, from the rank's later virtual stages, which
read it from the cache and left their gradients there, and from downstream, if it was relayed.
Each node stands between the source and all its uses in the chunk, so its backward runs once, when
the chunk's own gradient is complete.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Collect = Callable[[], Iterable[Tensor | None]]
Keep = Callable[[Tensor], None]


class JoinGradients(torch.autograd.Function):
    """The source as it is; backward adds what others left to its gradient."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, collect: Collect) -> Tensor:
        """Returns a view of ``source``."""
        ctx.collect = collect
        return source.view_as(source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The joined gradient goes to where the source came from."""
        return join(gradient, ctx.collect()), None


class KeepGradient(torch.autograd.Function):
    """A source that did not come through the graph; backward hands its gradient to ``keep``.

    ``anchor`` is any input of the chunk that requires a gradient: without it autograd would not
    visit the node. It gets none from here.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, source: Tensor, keep: Keep) -> Tensor:
        """Returns a view of ``source`` that requires a gradient."""
        ctx.keep = keep
        return source.view_as(source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        """Nothing flows on."""
        ctx.keep(gradient)
        return None, None, None


def join(gradient: Tensor, others: Iterable[Tensor | None]) -> Tensor:
    """The sum of a gradient and what else there is."""
    for other in others:
        if other is not None:
            gradient = gradient + other
    return gradient
