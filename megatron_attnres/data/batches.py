"""Micro-batches of one data-parallel rank, in an order that no layout changes."""

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset

Batch = dict[str, torch.Tensor]
"""``tokens`` and ``labels`` [b, s] int64, ``loss_mask`` [b, s] float32, on the CPU."""

_KEYS = ("tokens", "labels", "loss_mask")


def microbatch_indices(
    consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> range:
    """Return which samples of the dataset make a rank's next micro-batch.

    The ranks take consecutive slices of the dataset's order, as MegatronPretrainingSampler deals
    them: on rank r of R, micro-batch m of a step begins at sample ``consumed_samples + (m * R + r)
    * micro_batch_size``. A step of a given global batch reads the same samples in any layout.

    Args:
        consumed_samples: samples that all ranks together have taken before.
        micro_batch_size: samples per micro-batch and rank.
        data_parallel_rank: this rank, from 0.
        data_parallel_size: number of data-parallel ranks.
    """
    start = consumed_samples + data_parallel_rank * micro_batch_size
    return range(start, start + micro_batch_size)


def samples_of_step(
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_microbatches: int,
) -> list[range]:
    """``microbatch_indices`` of every micro-batch of a rank's step."""
    together = micro_batch_size * data_parallel_size
    return [
        microbatch_indices(
            consumed_samples + microbatch * together,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )
        for microbatch in range(num_microbatches)
    ]


def batches(
    dataset: Dataset,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int = 0,
) -> Iterator[Batch]:
    """Yield a rank's micro-batches from ``consumed_samples`` on.

    The iterator ends, on all ranks at the same micro-batch, where the dataset's samples end; the
    dataset must be built with as many samples as the whole training takes.

    Args:
        dataset: from ``build_datasets``.
        consumed_samples: samples that all ranks together took before; 0 at the start of training.
        micro_batch_size: samples per micro-batch and rank.
        data_parallel_rank: this rank, from 0.
        data_parallel_size: number of data-parallel ranks.
        num_workers: processes that read ahead; 0 reads here, when asked.
    """
    sampler = _MicroBatches(
        _size(dataset), consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size
    )
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_stack,
        # A generator of its own: the loader draws a seed, which must not move the global one.
        generator=torch.Generator(),
    )
    yield from loader


@dataclass(frozen=True)
class _MicroBatches:
    """The indices of a rank's micro-batches, one range each."""

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __iter__(self) -> Iterator[range]:
        together = self.micro_batch_size * self.data_parallel_size
        last = self.total_samples - together
        for consumed in range(self.consumed_samples, last + 1, together):
            yield microbatch_indices(
                consumed, self.micro_batch_size, self.data_parallel_rank, self.data_parallel_size
            )


def _size(dataset: Dataset) -> int:
    assert isinstance(dataset, Sized)
    return len(dataset)


def _stack(samples: Sequence[Batch]) -> Batch:
    return {key: torch.stack([sample[key] for sample in samples]) for key in _KEYS}
