"""Finding a checkpoint, checking it, and filling this rank's state from it, in any layout."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import distributed

from megatron_attnres.errors import InputError
from megatron_attnres.optimizer.training_optimizer import TrainingOptimizer
from megatron_attnres.parallel.agreement import same_error_on_all_ranks
from megatron_attnres.training.checkpoints.folders import (
    LATEST,
    digests_in,
    folder_of,
    iterations_in,
    newest,
    verify,
)
from megatron_attnres.training.checkpoints.pieces import StatePieces
from megatron_attnres.training.checkpoints.plans import WEIGHTS, read_pieces
from megatron_attnres.training.checkpoints.safe_reader import SafeReader

AUTO = "auto"


def find_checkpoint(load: str, save: str | None) -> Path | None:
    """The whole checkpoint that ``--load`` means, its files compared with their sums. Collective.

    Args:
        load: a folder of checkpoints, a checkpoint, ``latest`` (the newest of ``save``) or
            ``auto`` (the newest of ``save`` that is whole).
        save: the run's own folder.

    Returns:
        None for ``auto`` where there is nothing to load.

    Raises:
        InputError: there is none, or a file is damaged; the same on all ranks.
    """
    if load == AUTO:
        return _newest_whole(save)
    with same_error_on_all_ranks(), named(load):
        found = newest(save if load == LATEST else load)
    verify_together(found, load)
    return found


def load_training(
    folder: Path,
    pieces: StatePieces,
    optimizer: TrainingOptimizer,
    steps: int,
    weights_only: bool,
) -> None:
    """Fill master weights and moments, or the weights alone; model parameters follow.

    Args:
        folder: the checkpoint.
        pieces: of this rank.
        optimizer: of this rank; goes on after ``steps`` updates.
        steps: updates that the checkpoint's optimizer has made; 0 for the weights alone.
        weights_only: leave the moments as they are.

    Raises:
        InputError: a file cannot be read, or asks for more than numbers; the same on all ranks.
    """
    wanted = pieces.to_read()
    if weights_only:
        wanted = [piece for piece in wanted if piece.name.startswith(f"{WEIGHTS}.")]
    with same_error_on_all_ranks(), named(str(folder)):
        reader = SafeReader(folder)
        read_pieces(reader, reader.read_metadata(), wanted)
    optimizer.continue_from(steps)


def _newest_whole(save: str) -> Path | None:
    candidates: list[list[int]] = [iterations_in(save)]
    # Rank 0's view: others may see a shared folder a little later.
    distributed.broadcast_object_list(candidates)
    for iteration in reversed(candidates[0]):
        folder = folder_of(save, iteration)
        try:
            verify_together(folder, AUTO)
        except InputError as error:
            if distributed.get_rank() == 0:
                print(f"warning: {error}; trying the one before", file=sys.stderr)
        else:
            return folder
    return None


def verify_together(folder: Path, load: str) -> None:
    """Compare all files with their sums; every rank takes some. Collective.

    Raises:
        InputError: names the first that differs; the same on all ranks.
    """
    with same_error_on_all_ranks(), named(load):
        digests = digests_in(folder)
        names = sorted(digests)
        verify(folder, names[distributed.get_rank() :: distributed.get_world_size()], digests)


@contextmanager
def named(load: str) -> Iterator[None]:
    """Put the flag before an error's text."""
    try:
        yield
    except InputError as error:
        raise InputError(f"--load {load}: {error}") from error
