"""Everything that is specific to a host without an accelerator.

Megatron-Core 0.16 and 0.19 name CUDA literally in a few places that run on any device. On a CPU
host these are redirected here; on a CUDA host nothing in this file takes effect.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Parameters of glibc's mallopt, and the threshold that turns trimming off (mallopt(3)).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1


def device() -> torch.device:
    """Where parameters and activations live: this rank's CUDA device, else the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def accelerator_name() -> str | None:
    """As its maker names it; None on a CPU host."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def redirect_cuda_calls() -> None:
    """Point Megatron-Core's literal CUDA calls at the CPU. Does nothing where CUDA exists.

    - ``torch.cuda.current_device()`` as a tensor's device (tensor-parallel layers, schedules);
    - ``torch.cuda.synchronize()`` after batched p2p;
    - ``torch.zeros(..., device="cuda")`` for the token counters of the schedules.
    """
    if torch.cuda.is_available():
        return
    from megatron.core.pipeline_parallel import schedules

    torch.cuda.current_device = _cpu_device
    torch.cuda.synchronize = _nothing_to_wait_for
    schedules.torch = _TorchWithoutCuda()


def keep_freed_memory() -> None:
    """Let the C library keep memory that tensors give back. Does nothing where CUDA or glibc isn't.

    glibc returns freed memory to the system as soon as there is more of it than twice the largest
    tensor freed so far, and a step's next tensors pay for every page again: several times what
    writing to them costs. The size from which a tensor gets pages of its own stays at the most to
    which glibc would raise it itself.
    """
    library = ctypes.CDLL(None)
    if torch.cuda.is_available() or not hasattr(library, "gnu_get_libc_version"):
        return
    library.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    library.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def import_megatron_core() -> None:
    """Import Megatron-Core without loading torch's compiler. Does nothing special with CUDA.

    It decorates its CUDA fusions with torch.compile, which takes two thirds of a rank's start-up
    time; on a CPU host none of these fusions runs.
    """
    with without_compiler():
        import megatron.core.pipeline_parallel.schedules  # noqa: F401


@contextmanager
def without_compiler() -> Iterator[None]:
    """Modules imported in the body keep the functions that they decorate with torch.compile as
    they are, and do not load the compiler for it. Does nothing where CUDA exists.
    """
    compiler = torch.compile
    if not torch.cuda.is_available():
        torch.compile = _uncompiled
    try:
        yield
    finally:
        torch.compile = compiler


def _uncompiled(function: Any = None, **options: Any) -> Any:
    """Stands for ``torch.compile``, called or used as a decorator with options."""
    return function if function is not None else lambda decorated: decorated


def _cpu_device() -> torch.device:
    return torch.device("cpu")


def _nothing_to_wait_for(device: Any = None) -> None:
    """CPU tensors are complete when the call that made them returns."""


class _TorchWithoutCuda:
    """The torch module as the schedules see it, with ``zeros`` on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **keywords: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **keywords)
