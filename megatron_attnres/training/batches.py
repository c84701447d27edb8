"""The micro-batches that this rank's chunks read."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch.utils.data import Dataset

from megatron_attnres.data.batches import Batch, batches, samples_of_step
from megatron_attnres.data.order import order_digest
from megatron_attnres.parallel.cpu import device
from megatron_attnres.training.run_config import RunConfig


@dataclass(frozen=True)
class BatchSource:
    """Training and validation data of one rank.

    Attributes:
        config: of the run.
        data_rank: data-parallel rank.
        training, validation: datasets; validation is None where it is not asked for.
    """

    config: RunConfig
    data_rank: int
    training: Dataset
    validation: Dataset | None

    def training_batches(self, consumed_samples: int) -> Iterator[Batch]:
        """Micro-batches from a position in the data order, to the end of the run."""
        return self._batches(self.training, consumed_samples)

    def samples_of_step(self, consumed_samples: int) -> list[range]:
        """Which samples this rank's micro-batches of the next step are, by the data order."""
        return samples_of_step(
            consumed_samples,
            self.config.loop.micro_batch_size,
            self.data_rank,
            self.config.layout.data,
            self.config.num_microbatches,
        )

    def validation_batches(self) -> Iterator[Batch]:
        """The same micro-batches at every validation, so that losses compare."""
        return self._batches(self.validation, 0)

    def order_digest(self, samples: int) -> str:
        """Tells whether another run's first samples were the same; see ``data.order``."""
        return order_digest(self.training, samples)

    def _batches(self, dataset: Dataset, consumed_samples: int) -> Iterator[Batch]:
        for batch in batches(
            dataset,
            consumed_samples,
            self.config.loop.micro_batch_size,
            self.data_rank,
            self.config.layout.data,
            self.config.data.num_workers,
        ):
            yield {key: tensor.to(device(), non_blocking=True) for key, tensor in batch.items()}
