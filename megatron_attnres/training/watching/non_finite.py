"""Where a NaN or infinity of a skipped step came from: rank, layer, parameter.

Gradients are looked at before data-parallel ranks average them, which would spread what one rank
has to all. Backward runs from the last layer to the first, so the first bad gradient is the one
that is last in the model. A bad loss makes every gradient bad and says nothing of its origin: then
the step's forward runs once more, and the first module whose output is bad is named.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from megatron_attnres.pipeline.chunk import PipelineChunk
from megatron_attnres.training.watching.rank_record import host_name

GradientOf = Callable[[nn.Parameter], Tensor | None]


@dataclass(frozen=True)
class BadGradient:
    """The first bad gradient of one rank in the order of backward.

    Attributes:
        rank, host: where.
        chunk: in which it lies.
        name: global name of the parameter.
        count, of: bad gradients on the rank, and all of them.
    """

    rank: int
    host: str
    chunk: int
    name: str
    count: int
    of: int


@dataclass(frozen=True)
class BadOutput:
    """The first bad output of one rank in the order of forward.

    Attributes:
        rank, host: where.
        chunk, microbatch: of the forward.
        name: of the module that put it out.
        weight: a parameter that is bad itself, by its global name: the module's own, else any of
            the chunk's. Depth attention reads ahead for later layers.
    """

    rank: int
    host: str
    chunk: int
    microbatch: int
    name: str
    weight: str | None


class _Seen(NamedTuple):
    """A module's output, and where its flag lies on the device."""

    chunk: PipelineChunk
    microbatch: int
    name: str
    is_finite: Tensor


class GradientProbe:
    """Looks at a rank's gradients of a step without waiting for the device.

    Args:
        chunks: of this rank.
        gradient_of: where a parameter's accumulated gradient lies.
    """

    def __init__(self, chunks: Sequence[PipelineChunk], gradient_of: GradientOf) -> None:
        # Backward's order, by and large: modules are declared in the order in which they run.
        self._parameters = [
            (chunk.boundary.chunk.index, chunk.module.global_name(name), parameter)
            for chunk in reversed(chunks)
            for name, parameter in reversed(list(chunk.module.named_parameters()))
        ]
        self._gradient_of = gradient_of
        self._seen: list[tuple[int, str]] = []
        self._largest: list[Tensor] = []

    def look(self) -> None:
        """Remember which gradients are bad; call it before they are summed or averaged."""
        self._seen, gradients = [], []
        for chunk, name, parameter in self._parameters:
            gradient = self._gradient_of(parameter)
            if gradient is not None:
                self._seen.append((chunk, name))
                gradients.append(gradient)
        # The largest magnitude is not finite where any element is not. One pass, no waiting.
        self._largest = torch._foreach_norm(gradients, float("inf")) if gradients else []

    def first_bad(self) -> BadGradient | None:
        """What the last look saw; waits for the device."""
        if not self._largest:
            return None
        finite = torch.isfinite(torch.stack(list(self._largest))).tolist()
        bad = [place for place, good in zip(self._seen, finite, strict=True) if not good]
        if not bad:
            return None
        chunk, name = bad[0]
        return BadGradient(
            distributed.get_rank(), host_name(), chunk, name, len(bad), len(self._seen)
        )


class OutputProbe:
    """Watches a forward for the first module whose output is bad."""

    def __init__(self) -> None:
        self._outputs: list[_Seen] = []

    @contextmanager
    def watch(self, chunks: Sequence[PipelineChunk]) -> Iterator[None]:
        """The forward runs inside."""
        handles = []
        for chunk in chunks:
            runs = {"microbatch": -1}
            handles.append(chunk.register_forward_pre_hook(_counter(runs)))
            for name, module in chunk.module.named_modules():
                handles.append(module.register_forward_hook(self._hook(chunk, name, runs)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def first_bad(self) -> BadOutput | None:
        """What was seen. A module's hook runs before that of the module it lies in."""
        for seen in self._outputs:
            if not seen.is_finite.item():
                return BadOutput(
                    distributed.get_rank(),
                    host_name(),
                    seen.chunk.boundary.chunk.index,
                    seen.microbatch,
                    seen.name or "the chunk",
                    _bad_weight(seen.chunk.module, seen.name),
                )
        return None

    def _hook(self, chunk: PipelineChunk, name: str, runs: dict[str, int]) -> Callable[..., None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = [one for one in _tensors(output) if one.is_floating_point()]
            if tensors:
                finite = torch.stack([torch.isfinite(one).all() for one in tensors]).all()
                self._outputs.append(_Seen(chunk, runs["microbatch"], name, finite))

        return look


def first_of_all_ranks(found: BadGradient | BadOutput | None) -> list[Any]:
    """What every rank found, on all ranks; without those that found nothing. Collective."""
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, found)
    return [one for one in everyone if one is not None]


def gradients_in_words(found: Sequence[BadGradient]) -> str:
    """Names the first bad gradient of all ranks: of the last chunk that has one."""
    if not found:
        return "the gradient's norm is not finite though every gradient is: it is too large"
    first = max(found, key=lambda one: one.chunk)
    others = f", {len(found)} ranks have some" if len(found) > 1 else ""
    return (
        f"gradient not finite, first in {_place(first.name)} on rank {first.rank} ({first.host}); "
        f"{first.count} of its {first.of} gradients{others}"
    )


def outputs_in_words(found: Sequence[BadOutput]) -> str:
    """Names the first bad output of all ranks."""
    if not found:
        return (
            "loss not finite, but the same forward a second time is: suspect the hardware of a rank"
        )
    first = min(found, key=lambda one: (one.microbatch, one.chunk))
    weight = f"; its weight {first.weight} is not finite" if first.weight else ""
    return (
        f"loss not finite, first in the output of {_place(first.name)}, micro-batch "
        f"{first.microbatch}, on rank {first.rank} ({first.host}){weight}"
    )


def _place(name: str) -> str:
    """A global name, with the layer in words."""
    layer = re.search(r"\blayers\.(\d+)\b", name)
    return f"layer {layer.group(1)}, {name}" if layer else name


def _counter(runs: dict[str, int]) -> Callable[..., None]:
    def count(module: nn.Module, inputs: Any) -> None:
        runs["microbatch"] += 1

    return count


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for one in output:
            yield from _tensors(one)


def _bad_weight(chunk: nn.Module, module: str) -> str | None:
    """Of the module itself, else of the chunk that it lies in."""
    bad = [
        name for name, parameter in chunk.named_parameters() if not torch.isfinite(parameter).all()
    ]
    own = [name for name in bad if name.rpartition(".")[0] == module]
    return next((chunk.global_name(name) for name in own + bad), None)
