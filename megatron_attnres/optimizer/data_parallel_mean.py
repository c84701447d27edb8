"""Averages gradients over data-parallel ranks, in buckets."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

# Elements per all-reduce: large enough to be limited by bandwidth, small enough that the flat
# copy stays a fraction of the gradients. Megatron's and DeepSpeed's defaults are of this order.
BUCKET_ELEMENTS = 40_000_000


def average_over_data_parallel_ranks(
    gradients: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Replace each gradient, in place and in its own data type, by its mean over the group."""
    ranks = group.size()
    if ranks == 1:
        return
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat.div_(ranks), group=group)
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, mean in zip(bucket, parts, strict=True):
            gradient.copy_(mean.view_as(gradient))


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    elements = 0
    for gradient in gradients:
        if bucket and elements + gradient.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
        bucket.append(gradient)
        elements += gradient.numel()
    if bucket:
        yield bucket
