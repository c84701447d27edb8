"""A block's reads of the depth state, and how far their results are from the exact ones.

Exact is the reference in float64 on the very same operands, narrow ones upcast. Errors are
norm-wise: norm of the difference over norm of the exact tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megatron_attnres.depth_attention import operators, reference, tiles
from megatron_attnres.depth_attention.module import DepthAttention
from megatron_attnres.depth_attention.state import DepthState

EPS = 1e-6
# What is required of the output and of the gradient of every operand.
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}
# Phase 1 works on so many tokens at a time unless a test says otherwise: a block of the tests has
# several tiles, and the last one is shorter in nearly all.
TOKENS_PER_TILE = 7

Leaves = dict[str, Tensor]


@dataclass(frozen=True)
class Block:
    """The sublayers of one block that run together.

    Attributes:
        summaries: completed summaries, read by every sublayer.
        readers: sublayers.
        starts: whether the first of them is the block's first, which has no partial sum.
        tokens: s; the batch size is 2.
        hidden: h.
        biased: whether the readers have a recency bias.
        scales: each source's standard deviation is one of these, drawn at random.
        apart: of sources that have one part in common, how large the rest is beside it; None for
            sources that have nothing in common. Cumulative sources are much alike.
        seed: of everything random.
    """

    summaries: int
    readers: int = 1
    starts: bool = False
    tokens: int = 4
    hidden: int = 8
    biased: bool = False
    scales: tuple[float, ...] = (1.0,)
    seed: int = 0
    apart: float | None = None

    def layers(self, readers: list[DepthAttention]) -> list[list[DepthAttention]]:
        """Two readers to a layer; one in the first if the block begins inside it."""
        first = 1 + self.seed % 2
        rest = range(first, len(readers), 2)
        return [readers[:first], *(readers[start : start + 2] for start in rest)]

    def partial(self, reader: int) -> str | None:
        """The name of the partial sum that a reader reads."""
        return None if self.starts and reader == 0 else f"partial sum {reader}"

    def leaves(self, dtype: torch.dtype) -> Leaves:
        """Every operand. Logits are of order one to three: those of trained models are.

        The error of a logit grows with it, so a huge one leaves no digits in float32.
        """
        generator = torch.Generator().manual_seed(self.seed)
        length = (self.hidden,)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        common = normal(self.tokens, 2, self.hidden) if self.apart is not None else None

        def source() -> Tensor:
            index = torch.randint(len(self.scales), (1,), generator=generator).item()
            own = normal(self.tokens, 2, self.hidden)
            return self.scales[index] * (own if common is None else common + self.apart * own)

        leaves = {f"summary {index}": source() for index in range(self.summaries)}
        for reader in range(self.readers):
            size = 0.5 + 2 * torch.rand(1, generator=generator, dtype=torch.float64)
            leaves[f"query {reader}"] = normal(*length) * size * self.hidden**-0.5
            leaves[f"key norm {reader}"] = 1 + 0.3 * normal(*length)
            if self.biased:
                leaves[f"bias {reader}"] = normal(1)
            if (name := self.partial(reader)) is not None:
                leaves[name] = source()
        return {name: tensor.to(dtype) for name, tensor in leaves.items()}

    def gradients(self, dtype: torch.dtype) -> list[Tensor]:
        """The gradient that comes back to every reader's output."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.tokens, 2, self.hidden)
        return [torch.randn(shape, generator=generator).to(dtype) for _ in range(self.readers)]


Read = Callable[[Block, Leaves], list[Tensor]]


def by_reference(block: Block, leaves: Leaves) -> list[Tensor]:
    """Every reader on its own, by the definition."""
    return [reference.depth_attention(*_read(block, leaves, s)) for s in range(block.readers)]


def one_by_one(block: Block, leaves: Leaves) -> list[Tensor]:
    """Every reader on its own, all its sources at once."""
    return [
        operators.depth_attention(*_read(block, leaves, reader), operator="two-phase")
        for reader in range(block.readers)
    ]


def in_two_phases(block: Block, leaves: Leaves) -> list[Tensor]:
    """Phase 1 once for all readers, then each reader's phase 2, as a model's layers do it."""
    readers = [reader_module(block, leaves, reader) for reader in range(block.readers)]
    summaries = tuple(leaves[f"summary {index}"] for index in range(block.summaries))
    partials = [leaves.get(block.partial(reader)) for reader in range(block.readers)]
    state = readers[0].look_ahead(DepthState(summaries, partials[0]), block.layers(readers))
    outputs = []
    for reader, partial in zip(readers, partials, strict=True):
        outputs.append(reader(state._replace(partial=partial)))
        state = state._replace(ahead=state.ahead[1:])
    return outputs


def reader_module(block: Block, leaves: Leaves, reader: int) -> DepthAttention:
    """A sublayer's reader with the leaves, which are parameters, as its own."""
    module = DepthAttention(block.hidden, EPS, 0.0 if block.biased else None, operator="two-phase")
    module.query = leaves[f"query {reader}"]
    module.key_norm_weight = leaves[f"key norm {reader}"]
    module.recency_bias = leaves.get(f"bias {reader}")
    return module


def results(read: Read, block: Block, leaves: Leaves, gradients: list[Tensor]) -> Leaves:
    """Outputs and the gradients of all operands."""
    parameters = {name: nn.Parameter(leaf.clone()) for name, leaf in leaves.items()}
    outputs = read(block, parameters)
    found = torch.autograd.grad(outputs, list(parameters.values()), gradients)
    named = {f"output {reader}": output.detach() for reader, output in enumerate(outputs)}
    return named | dict(zip(parameters, found, strict=True))


def errors(
    read: Read, block: Block, dtype: torch.dtype, tile_bytes: int | None = None
) -> dict[str, float]:
    """Norm-wise relative error of every output and gradient.

    A gradient that is exactly zero (a pseudo-query's when there is a single source) must be found
    to be exactly zero: anything else is an infinite error. A bias's gradient is one number, a sum
    over tokens that may cancel to nothing, so its error is over the sum of absolute terms.

    Args:
        read: the form under test.
        block: its operands.
        dtype: their data type.
        tile_bytes: size of phase 1's tiles, TOKENS_PER_TILE tokens of the summaries by default.
    """
    leaves, gradients = block.leaves(dtype), block.gradients(dtype)
    wide = {name: leaf.double() for name, leaf in leaves.items()}
    wide_gradients = [gradient.double() for gradient in gradients]
    default = TOKENS_PER_TILE * block.summaries * block.hidden * dtype.itemsize
    with mock.patch.dict(tiles._BYTES, cpu=tile_bytes or default):
        found = results(read, block, leaves, gradients)
    wanted = results(by_reference, block, wide, wide_gradients)
    relative = {}
    for name, exact in wanted.items():
        assert found[name].dtype == dtype
        assert found[name].isfinite().all(), name
        size = exact.norm()
        if name.startswith("bias"):
            reader = int(name.removeprefix("bias "))
            size = _bias_terms(block, wide, reader, wide_gradients[reader]).abs().sum()
        difference = (found[name].double() - exact).norm()
        relative[name] = 0.0 if difference == 0 else (difference / size).item()
    return relative


def check(read: Read, block: Block, dtype: torch.dtype, tile_bytes: int | None = None) -> None:
    """Hold every output and gradient against the limit of the data type."""
    relative = errors(read, block, dtype, tile_bytes)
    wrong = {name: error for name, error in relative.items() if error > LIMITS[dtype]}
    assert not wrong, f"{dtype}, {block}: {wrong}"


def _read(block: Block, leaves: Leaves, reader: int) -> tuple[Any, ...]:
    """Operands of one reader's ``depth_attention``."""
    names = [f"summary {index}" for index in range(block.summaries)]
    if (partial := block.partial(reader)) is not None:
        names.append(partial)
    return (
        [leaves[name] for name in names],
        leaves[f"query {reader}"],
        leaves[f"key norm {reader}"],
        EPS,
        leaves.get(f"bias {reader}"),
    )


def _bias_terms(block: Block, leaves: Leaves, reader: int, gradient: Tensor) -> Tensor:
    """What every token adds to the gradient of the newest source's logit: p (v - h) . dh."""
    operands = _read(block, leaves, reader)
    mixed, weights = reference.depth_attention(*operands, return_weights=True)
    return weights[-1] * ((operands[0][-1] - mixed) * gradient).sum(-1)
