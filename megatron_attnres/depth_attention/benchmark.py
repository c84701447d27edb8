"""Timing depth attention against the paper's pseudo-code, a layer and the memory bus.

What is timed is a block of sublayers at the depth where it reads the most: phase 1 once for all of
them (a model's layers read ahead two by two), phase 2 for each, gradients of everything. All forms
are timed in turn, round by round, so that a drift of the machine's speed meets all of them; what
counts are ratios within a round and their medians.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_attnres.depth_attention.module import DepthAttention
from megatron_attnres.depth_attention.names import OperatorName
from megatron_attnres.depth_attention.operators import choose
from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.depth_attention.statistics import inverse_rms

Read = Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]
EPS = 1e-6


@dataclass(frozen=True)
class OperatorCase:
    """One block's reads of the depth state.

    Attributes:
        hidden: h.
        tokens: s x b.
        sources: read at once by every sublayer: completed summaries and the partial sum.
        sublayers: S, of the block.
        dtype: of sources and parameters.
    """

    hidden: int
    tokens: int
    sources: int
    sublayers: int
    dtype: torch.dtype


class BlockReads:
    """The operands of a block's reads, and the reads.

    Every sublayer has a partial sum of its own, as in a model, where it grows from one to the next.
    """

    def __init__(self, case: OperatorCase, device: torch.device) -> None:
        self._shape = (case.tokens, 1, case.hidden)
        self._make = {"dtype": case.dtype, "device": device}
        self.summaries = [self._random() for _ in range(max(1, case.sources - 1))]
        # A single source is b_0: the first sublayer of all, before there is a partial sum.
        self.partials = [
            self._random() if case.sources > 1 else None for _ in range(case.sublayers)
        ]
        self.readers = [
            DepthAttention(case.hidden, EPS, None, case.dtype).to(device)
            for _ in range(case.sublayers)
        ]
        self._layers = [self.readers[start : start + 2] for start in range(0, case.sublayers, 2)]
        for reader in self.readers:
            torch.nn.init.normal_(reader.query, std=case.hidden**-0.5)
        # Those of older summaries are there from the block before.
        self._norms = tuple(inverse_rms(summary, EPS) for summary in self.summaries[:-1])
        self._gradient = torch.ones(self._shape, **self._make)

    def ours(self, operator: OperatorName, backward: bool) -> None:
        """All sublayers' reads, as the model's layers make them."""
        state = DepthState(tuple(self.summaries), self.partials[0], self._norms)
        consumed = []
        for reader in self.readers:
            reader.operator = operator
        with torch.set_grad_enabled(backward):
            state = self.readers[0].look_ahead(state, self._layers)
            for reader, partial in zip(self.readers, self.partials, strict=True):
                read = reader(state._replace(partial=partial))
                consumed.append(_Consumed.apply(read, self._gradient))
                state = state._replace(ahead=state.ahead[1:])
        if backward:
            parameters = [parameter for r in self.readers for parameter in r.parameters()]
            torch.autograd.grad(consumed, [*self._sources(), *parameters])

    def one(self, read: Read, backward: bool) -> None:
        """The first sublayer's read by another form."""
        first, partial = self.readers[0], self.partials[0]
        sources = self.summaries if partial is None else [*self.summaries, partial]
        with torch.set_grad_enabled(backward):
            mixed = read(sources, first.query, first.key_norm_weight)
            consumed = _Consumed.apply(mixed, self._gradient)
        if backward:
            del mixed
            torch.autograd.grad(consumed, [*sources, *first.parameters()])

    def copier(self) -> Callable[[], None]:
        """Copies what one sublayer reads to memory that is there already."""
        sources = [
            tensor.detach() for tensor in (*self.summaries, self.partials[0]) if tensor is not None
        ]
        targets = [torch.empty_like(source) for source in sources]

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        return copy

    def _sources(self) -> list[Tensor]:
        return [*self.summaries, *(partial for partial in self.partials if partial is not None)]

    def _random(self) -> Tensor:
        return torch.randn(self._shape, **self._make).requires_grad_()


class _Consumed(torch.autograd.Function):
    """Takes a read away as a sublayer would: nothing of it is kept, its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, read: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return read.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


def pseudo_code(sources: Sequence[Tensor], query: Tensor, key_norm_weight: Tensor) -> Tensor:
    """Depth attention as the paper's pseudo-code: stack, norm, einsum, softmax, einsum."""
    values = torch.stack(tuple(sources))
    mean_square = values.float().pow(2).mean(-1, keepdim=True)
    keys = (values.float() * torch.rsqrt(mean_square + EPS)).to(values.dtype) * key_norm_weight
    logits = torch.einsum("h,nsbh->nsb", query, keys)
    weights = logits.float().softmax(0).to(values.dtype)
    return torch.einsum("nsb,nsbh->sbh", weights, values)


def fla_reference() -> Read | None:
    """fla-core's plain operator; None where it, or Triton, which it imports, is not installed."""
    if find_spec("fla") is None or find_spec("triton") is None:
        return None
    from fla.ops.attnres import naive_attnres

    return lambda sources, query, weight: naive_attnres(query, sources, weight, rms_eps=EPS)


def benchmark_operator(
    case: OperatorCase, layer: Callable[[], None], rounds: int, device: torch.device
) -> dict[str, Any]:
    """One row of the benchmark; times are of one sublayer's read, in ms.

    Args:
        case: sizes.
        layer: forward and backward of a Transformer layer of the same width and tokens.
        rounds: timed rounds.
        device: where.
    """
    reads = BlockReads(case, device)
    forms: dict[str, Callable[[], None]] = {"layer": layer, "copy": reads.copier()}
    others = {"naive": pseudo_code, "fla_naive": fla_reference()}
    for name, read in others.items():
        if read is not None:
            forms[name] = lambda read=read: reads.one(read, backward=True)
            forms[f"{name}_forward"] = lambda read=read: reads.one(read, backward=False)
    ours = {"ours": "two-phase"}
    if choose("auto", device, case.dtype, biased=False) == "fused":
        ours["fused"] = "fused"
    for name, operator in ours.items():
        forms[name] = lambda operator=operator: reads.ours(operator, backward=True)
        forms[f"{name}_forward"] = lambda operator=operator: reads.ours(operator, backward=False)

    times = time_in_turn(forms, rounds, device)
    for name in (*ours, *(f"{name}_forward" for name in ours)):
        times[name] = [one / case.sublayers for one in times[name]]
    return {
        **asdict(case),
        "dtype": str(case.dtype).removeprefix("torch."),
        **{f"{name}_ms": median(values) for name, values in times.items()},
        "speedup": median_ratio(times["naive"], times["ours"]),
        "speedup_forward": median_ratio(times["naive_forward"], times["ours_forward"]),
        "share_of_layer": 2 * median_ratio(times["ours"], times["layer"]),
        "extra_bytes": peak_allocated(forms["ours"], device) // case.sublayers,
        "naive_extra_bytes": peak_allocated(forms["naive"], device),
        **_roofline(case, times),
    }


def time_in_turn(
    forms: dict[str, Callable[[], None]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of every form in every round, after two rounds of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for index in range(rounds + 2):
        for name, run in forms.items():
            _synchronize(device)
            start = time.perf_counter()
            run()
            _synchronize(device)
            if index >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median of the ratios within a round."""
    return median(one / other for one, other in zip(numerator, denominator, strict=True))


def peak_allocated(run: Callable[[], None], device: torch.device) -> int:
    """The most bytes that ``run`` has allocated at once, by torch's allocator."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [
        event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _roofline(case: OperatorCase, times: dict[str, list[float]]) -> dict[str, float]:
    """What a block's reads must move at least, and how fast that went beside a plain copy.

    Forward reads every summary once, and each sublayer its partial sum and writes its result;
    backward reads the same and the results' gradients and writes a gradient for each source.
    """
    source_bytes = case.tokens * case.hidden * case.dtype.itemsize
    summaries = max(1, case.sources - 1)
    partials = case.sublayers if case.sources > 1 else 0
    least = (3 * (summaries + partials) + 2 * case.sublayers) * source_bytes / case.sublayers
    return {
        "least_bytes": least,
        "bytes_per_second": 1e3 * least / median(times["ours"]),
        "copy_bytes_per_second": 1e3 * 2 * case.sources * source_bytes / median(times["copy"]),
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
