"""A run as something that can be saved and continued."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import distributed

from megatron_attnres.errors import InputError
from megatron_attnres.optimizer.training_optimizer import TrainingOptimizer
from megatron_attnres.parallel.agreement import same_error_on_all_ranks
from megatron_attnres.training.checkpoints.description import (
    Description,
    TrainingState,
    check_same,
    data_identity,
    describe,
    model_identity,
)
from megatron_attnres.training.checkpoints.folders import remove_unfinished
from megatron_attnres.training.checkpoints.loading import find_checkpoint, load_training, named
from megatron_attnres.training.checkpoints.pieces import StatePieces
from megatron_attnres.training.checkpoints.saving import CheckpointSaver
from megatron_attnres.training.run_config import RunConfig


class Resumable:
    """Parameters, optimizer, schedule and position of a run. Methods are collective.

    Args:
        config: of the run.
        plan: of its pipeline, for the record.
        pieces: this rank's state.
        optimizer: this rank's optimizer.
        scheduler: learning-rate schedule.
        order_digest: of so many first samples of the run's data.
        tokenizer: what tells the run's tokenizer from others, for the record.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: dict[str, Any],
        pieces: StatePieces,
        optimizer: TrainingOptimizer,
        scheduler: Any,
        order_digest: Callable[[int], str],
        tokenizer: dict[str, Any],
    ) -> None:
        self._config = config
        self._plan = plan
        self._pieces = pieces
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._order_digest = order_digest
        self._tokenizer = tokenizer

    def load(self) -> TrainingState:
        """Continue from where ``--load`` says, or start afresh.

        Raises:
            InputError: there is no such checkpoint, a file of it is damaged, or it is of another
                model or order of data.
        """
        loop = self._config.loop
        found = find_checkpoint(loop.load, loop.save) if loop.load is not None else None
        if loop.save is not None and distributed.get_rank() == 0:
            remove_unfinished(loop.save)
        if found is None:
            return TrainingState()
        description = self._check(found)
        steps = 0 if loop.load_weights_only else description.optimizer_steps
        load_training(found, self._pieces, self._optimizer, steps, loop.load_weights_only)
        if loop.load_weights_only:
            return TrainingState()
        self._scheduler.load_state_dict(description.scheduler)
        return description.state

    def saver(self) -> CheckpointSaver | None:
        """What saves the run; None without ``--save``."""
        if self._config.loop.save is None:
            return None
        return CheckpointSaver(self._config.save, self._pieces)

    def describe(self, state: TrainingState) -> Description:
        """What a checkpoint of this state says of itself."""
        return describe(
            self._config,
            self._plan,
            state,
            self._optimizer.steps,
            self._scheduler.state_dict(),
            self._order_digest(state.consumed_samples) if distributed.get_rank() == 0 else "",
            self._tokenizer,
        )

    def _check(self, folder: Path) -> Description:
        with same_error_on_all_ranks(), named(self._config.loop.load):
            description = Description.read(folder)
            check_same("model", description.model, model_identity(self._config.model))
            if not self._config.loop.load_weights_only:
                _check_has_state(description)
                check_same("data", description.data, data_identity(self._config))
                self._check_order(description)
        return description

    def _check_order(self, description: Description) -> None:
        """Refuse to skip samples or to take some twice."""
        samples = description.state.consumed_samples
        if distributed.get_rank() == 0 and description.order != self._order_digest(samples):
            raise InputError(
                f"its {samples} samples are not the first ones of this run's data; resume with the "
                "--data-path that was saved, and with its --train-iters if that takes several "
                "epochs"
            )


def _check_has_state(description: Description) -> None:
    """An import has neither moments nor an order of samples."""
    if not description.data:
        raise InputError("holds weights alone, as an import does; add --load-weights-only")
