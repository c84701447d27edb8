"""Timing depth attention against the paper's pseudo-code, a layer and the memory bus.

All forms are timed in turn, round by round, so that a drift of the machine's speed meets all of
them; what counts are ratios within a round and their medians.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from megatron_attnres.depth_attention.operators import depth_attention as fast

Operator = Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class OperatorCase:
    """One read of the depth state.

    Attributes:
        hidden: h.
        tokens: s x b.
        sources: read at once.
        dtype: of sources and parameters.
    """

    hidden: int
    tokens: int
    sources: int
    dtype: torch.dtype

    def operands(self, device: torch.device) -> tuple[list[Tensor], Tensor, Tensor]:
        """Sources, pseudo-query and key-norm weight, all requiring gradients."""
        make = {"dtype": self.dtype, "device": device}
        values = [
            torch.randn(self.tokens, 1, self.hidden, **make).requires_grad_()
            for _ in range(self.sources)
        ]
        query = torch.randn(self.hidden, **make).requires_grad_()
        return values, query, torch.ones(self.hidden, **make).requires_grad_()


def pseudo_code(sources: Sequence[Tensor], query: Tensor, key_norm_weight: Tensor) -> Tensor:
    """Depth attention as the paper's pseudo-code: stack, norm, einsum, softmax, einsum."""
    values = torch.stack(tuple(sources))
    mean_square = values.float().pow(2).mean(-1, keepdim=True)
    keys = (values.float() * torch.rsqrt(mean_square + 1e-6)).to(values.dtype) * key_norm_weight
    logits = torch.einsum("h,nsbh->nsb", query, keys)
    weights = logits.float().softmax(0).to(values.dtype)
    return torch.einsum("nsb,nsbh->sbh", weights, values)


def forward_and_backward(operator: Operator, operands: tuple[list[Tensor], Tensor, Tensor]) -> None:
    """One read and the gradients of all its operands."""
    sources, query, key_norm_weight = operands
    mixed = operator(sources, query, key_norm_weight)
    torch.autograd.grad(mixed, [query, key_norm_weight, *sources], torch.ones_like(mixed))


def forward_alone(operator: Operator, operands: tuple[list[Tensor], Tensor, Tensor]) -> None:
    """One read without gradients."""
    with torch.no_grad():
        operator(*operands)


def time_in_turn(
    forms: dict[str, Callable[[], None]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of every form in every round, after one round of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in forms}
    for index in range(rounds + 1):
        for name, run in forms.items():
            _synchronize(device)
            start = time.perf_counter()
            run()
            _synchronize(device)
            if index > 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def benchmark_operator(
    case: OperatorCase, layer: Callable[[], None], rounds: int, device: torch.device
) -> dict[str, Any]:
    """One row of the benchmark.

    Args:
        case: sizes.
        layer: forward and backward of a Transformer layer of the same width and tokens.
        rounds: timed rounds.
        device: where.
    """
    operands = case.operands(device)
    copied = [torch.empty_like(source) for source in operands[0]]

    def copy() -> None:
        for target, source in zip(copied, operands[0], strict=True):
            target.copy_(source.detach())

    forms = {
        "naive": lambda: forward_and_backward(pseudo_code, operands),
        "ours": lambda: forward_and_backward(fast, operands),
        "naive forward": lambda: forward_alone(pseudo_code, operands),
        "ours forward": lambda: forward_alone(fast, operands),
        "layer": layer,
        "copy": copy,
    }
    times = time_in_turn(forms, rounds, device)
    source_bytes = operands[0][0].numel() * operands[0][0].element_size()
    copy_bytes_per_ms = 2 * case.sources * source_bytes / median(times["copy"])
    # Forward reads all sources and writes one; backward reads sources and gradient, writes theirs.
    least_bytes = (3 * case.sources + 2) * source_bytes
    return {
        **asdict(case),
        "dtype": str(case.dtype).removeprefix("torch."),
        "naive_ms": median(times["naive"]),
        "ours_ms": median(times["ours"]),
        "naive_forward_ms": median(times["naive forward"]),
        "ours_forward_ms": median(times["ours forward"]),
        "layer_ms": median(times["layer"]),
        "speedup": _ratio(times["naive"], times["ours"]),
        "share_of_layer": 2 * _ratio(times["ours"], times["layer"]),
        "extra_bytes": kept_bytes(operands),
        "least_bytes": least_bytes,
        "bytes_per_second": 1e3 * least_bytes / median(times["ours"]),
        "copy_bytes_per_second": 1e3 * copy_bytes_per_ms,
    }


def kept_bytes(operands: tuple[list[Tensor], Tensor, Tensor]) -> int:
    """Bytes that the operator keeps for backward beside its operands, and its result."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*operands[0], *operands[1:])}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        mixed = fast(*operands)
    return sum(kept.values()) + mixed.untyped_storage().nbytes()


def _ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    return median(one / other for one, other in zip(numerator, denominator, strict=True))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
