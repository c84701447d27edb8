"""What a parameter is to the ranks that hold it, and its initial value.

A parameter's value at the start depends on the seed and its global name alone. The full tensor is
drawn on every rank that holds a slice of it, and tensor parallelism keeps a slice.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Initializer = Callable[[Tensor, torch.Generator], None]


@dataclass(frozen=True)
class Sharding:
    """How tensor parallelism slices one full tensor.

    Attributes:
        dim: the sliced dimension.
        stride: the dimension is that many matrices on top of each other, each of them sliced
            (SwiGLU's gate and up projection: 2). Megatron calls it partition_stride.
    """

    dim: int
    stride: int = 1

    def full_shape(self, local: torch.Size, world_size: int) -> list[int]:
        """The full tensor's shape."""
        shape = list(local)
        shape[self.dim] *= world_size
        return shape

    def slice(self, full: Tensor, rank: int, world_size: int) -> Tensor:
        """The part of the full tensor that a tensor-parallel rank holds."""
        matrices = full.chunk(self.stride, dim=self.dim)
        parts = [matrix.chunk(world_size, dim=self.dim)[rank] for matrix in matrices]
        return torch.cat(parts, dim=self.dim)


def mark_sharded(parameter: nn.Parameter, sharding: Sharding) -> None:
    """Mark a slice of a full tensor, in Megatron's attributes.

    Megatron-Core 0.16 leaves parameters that it does not initialise unmarked, 0.19 marks them.
    """
    parameter.tensor_model_parallel = True
    parameter.partition_dim = sharding.dim
    parameter.partition_stride = sharding.stride


def sharding_of(parameter: Tensor) -> Sharding | None:
    """How the parameter is sliced, or None if every tensor-parallel rank holds all of it."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return Sharding(parameter.partition_dim, parameter.partition_stride)


def mark_partial_gradient(parameter: nn.Parameter) -> None:
    """Mark a parameter held by all tensor-parallel ranks, each with a part of its gradient.

    Norms and pseudo-queries under sequence parallelism see a share of the tokens; the QK norms
    see a share of the heads. Their gradients are summed over the tensor-parallel group.
    """
    parameter.sum_gradient_over_tensor_parallel = True


def has_partial_gradient(parameter: Tensor) -> bool:
    """Whether ``mark_partial_gradient`` was applied."""
    return getattr(parameter, "sum_gradient_over_tensor_parallel", False)


def mark_tied_across_stages(parameter: nn.Parameter, *, copy: bool) -> None:
    """Mark the embedding (or its copy on the last stage) whose other half another stage holds.

    Their gradients are summed over the embedding group. The copy does not count in norms.
    """
    parameter.tied_across_stages = True
    parameter.shared_copy = copy


def is_tied_across_stages(parameter: Tensor) -> bool:
    """Whether ``mark_tied_across_stages`` was applied."""
    return getattr(parameter, "tied_across_stages", False)


def normal_initializer(std: float) -> Initializer:
    """Zero-mean normal values of this standard deviation."""

    def initialize(tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0.0, std, generator=generator)

    return initialize


def scaled_normal_initializer(std: float, num_layers: int) -> Initializer:
    """Megatron's rule for projections into the residual stream: std / sqrt(2 layers)."""
    return normal_initializer(std / math.sqrt(2 * num_layers))


@torch.no_grad()
def initialize_parameter(
    parameter: nn.Parameter,
    global_name: str,
    seed: int,
    initializer: Initializer,
    tensor_rank: int,
    tensor_size: int,
) -> None:
    """Fill a parameter with its share of the full tensor that (seed, global name) defines."""
    sharding = sharding_of(parameter)
    shape = sharding.full_shape(parameter.shape, tensor_size) if sharding else parameter.shape
    full = torch.empty(shape, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed_of(global_name, seed))
    initializer(full, generator)
    parameter.copy_(sharding.slice(full, tensor_rank, tensor_size) if sharding else full)


def seed_of(name: str, seed: int) -> int:
    """A generator's seed for one of the things that a run draws at random."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
