"""Saving while training goes on: stage, write beside, publish when every rank has written.

A save has three parts. ``start`` copies the state (its cost is the pause); a thread writes the
copy, alone, without talking to other ranks; when all threads are done, ``poll`` or ``finish``
brings the ranks together and publishes the folder. At most one save is in flight.
"""

import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import torch
from torch import distributed
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from megatron_attnres.errors import InputError
from megatron_attnres.parallel.cpu import device
from megatron_attnres.training.checkpoints.configuration import SaveConfig
from megatron_attnres.training.checkpoints.description import DESCRIPTION, Description
from megatron_attnres.training.checkpoints.folders import (
    METADATA,
    WRITING,
    digest_of,
    folder_of,
    publish,
    rotate,
)
from megatron_attnres.training.checkpoints.pieces import StatePieces
from megatron_attnres.training.checkpoints.plans import Piece, PieceSavePlanner

# Of the free memory a copy of the state may take so much; activations need the rest.
_SHARE_OF_FREE_MEMORY = 0.5


@dataclass
class _Save:
    """One save of one rank.

    Attributes:
        final: the folder's name when it is whole.
        description: written by rank 0.
        thread: that writes.
        results: what the library wrote where.
        digests: of the files that this rank wrote.
        error: why it could not.
    """

    final: Path
    description: Description
    thread: Thread | None = None
    results: list[Any] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def writing(self) -> Path:
        """The folder's name until then."""
        return self.final.with_name(self.final.name + WRITING)


class CheckpointSaver:
    """Saves one rank's part of a run. Every method but ``is_asynchronous`` is collective.

    Args:
        config: where and how.
        pieces: what this rank writes.
    """

    def __init__(self, config: SaveConfig, pieces: StatePieces) -> None:
        self._config = config
        self._live = pieces.to_write()
        self._staged = self._live
        self.is_asynchronous = config.asynchronous and _memory_allows(self._live)
        if self.is_asynchronous:
            self._staged = [_beside(piece) for piece in self._live]
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None
        self._in_flight: _Save | None = None
        self._failures = 0

    @property
    def must_try_again(self) -> bool:
        """Whether the last save failed and no other has begun."""
        return self._failures > 0 and self._in_flight is None

    def start(self, description: Description) -> None:
        """Save the state as it is now; waits for the save before, if it is still in flight.

        Raises:
            InputError: it cannot be written, for the last time that ``retries`` allows.
        """
        self.finish()
        self._agree_on_plan()
        if self.is_asynchronous:
            for live, staged in zip(self._live, self._staged, strict=True):
                staged.tensor.copy_(live.tensor, non_blocking=True)
            if device().type == "cuda":
                torch.cuda.synchronize()
        iteration = description.state.iteration
        save = _Save(folder_of(self._config.folder, iteration), description)
        self._in_flight = save
        if self.is_asynchronous:
            save.thread = Thread(target=self._write, args=(save,), name="checkpoint", daemon=True)
            save.thread.start()
        else:
            self._write(save)
            self._conclude()

    def poll(self) -> None:
        """Publish a save that all ranks have written.

        Raises:
            InputError: see ``start``.
        """
        if self._in_flight is None:
            return
        writing = torch.tensor(int(self._in_flight.thread.is_alive()), device=device())
        distributed.all_reduce(writing, distributed.ReduceOp.MAX)
        if not writing.item():
            self._conclude()

    def finish(self) -> None:
        """Wait for the save in flight, if any, and publish it.

        Raises:
            InputError: see ``start``.
        """
        if self._in_flight is not None:
            self._in_flight.thread.join()
            self._conclude()

    def _agree_on_plan(self) -> None:
        """Who writes what. It stays the same from save to save."""
        if self._plan is not None:
            return
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        planner = PieceSavePlanner(self._staged)
        planner.set_up_planner({}, is_coordinator=rank == 0)
        plans: list[Any] | None = [None] * ranks if rank == 0 else None
        distributed.gather_object(planner.create_local_plan(), plans)
        if rank == 0:
            plans, self._metadata = planner.create_global_plan(plans)
            plans = FileSystemWriter("").prepare_global_plan(plans)
        own: list[Any] = [None]
        distributed.scatter_object_list(own, plans)
        self._plan = own[0]

    def _write(self, save: _Save) -> None:
        """This rank's file, and the sums of it. Runs in a thread; talks to nobody."""
        try:
            save.writing.mkdir(parents=True, exist_ok=True)
            planner = PieceSavePlanner(self._staged)
            writer = FileSystemWriter(save.writing)
            save.results = writer.write_data(self._plan, planner).wait()
            for name in {result.storage_data.relative_path for result in save.results}:
                save.digests[name] = digest_of(save.writing / name)
        except Exception as error:
            save.error = f"{save.writing}: {getattr(error, 'strerror', None) or error}"

    def _conclude(self) -> None:
        """All ranks have written or failed: publish, or clean up and count the failure."""
        save, self._in_flight = self._in_flight, None
        everyone: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, (save.results, save.digests, save.error))
        error = next((error for *_, error in everyone if error is not None), None)
        if distributed.get_rank() == 0:
            if error is None:
                error = self._publish(save, everyone)
            if error is not None:
                shutil.rmtree(save.writing, ignore_errors=True)
        verdict = [error]
        distributed.broadcast_object_list(verdict)
        self._count(verdict[0])

    def _publish(self, save: _Save, everyone: list[Any]) -> str | None:
        """Rank 0's part; returns what went wrong."""
        try:
            writer = FileSystemWriter(save.writing)
            # A copy: the writer adds where this save's files are.
            metadata = replace(self._metadata)
            writer.finish(metadata, [results for results, *_ in everyone])
            save.description.write(save.writing)
            digests = {name: digest for _, some, _ in everyone for name, digest in some.items()}
            for name in (METADATA, DESCRIPTION):
                digests[name] = digest_of(save.writing / name)
            publish(save.writing, save.final, digests)
            rotate(self._config.folder, self._config.keep_last, self._config.keep_every)
        except OSError as error:
            return f"{save.final}: {error.strerror}"
        return None

    def _count(self, error: str | None) -> None:
        if error is None:
            self._failures = 0
            return
        self._failures += 1
        # The library words a full disk in several lines.
        message = f"--save {' '.join(error.split())}; give a writable folder with space"
        if self._failures > self._config.retries:
            raise InputError(message)
        if distributed.get_rank() == 0:
            print(
                f"warning: {message}; attempt {self._failures} of {self._config.retries + 1}, "
                "the run goes on",
                file=sys.stderr,
            )


def _memory_allows(pieces: list[Piece]) -> bool:
    """Whether every rank's host has room for copies of its ranks' pieces. Collective."""
    needed = sum(piece.tensor.nbytes for piece in pieces)
    largest = torch.tensor([needed], dtype=torch.int64, device=device())
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    free = psutil.virtual_memory().available
    on_host = max(1, torch.cuda.device_count() or distributed.get_world_size())
    fits = torch.tensor(
        int(largest.item() * on_host <= _SHARE_OF_FREE_MEMORY * free), device=device()
    )
    distributed.all_reduce(fits, distributed.ReduceOp.MIN)
    return bool(fits.item())


def _beside(piece: Piece) -> Piece:
    """A piece of host memory for a copy."""
    pinned = piece.tensor.device.type == "cuda"
    return replace(
        piece,
        tensor=torch.zeros(piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=pinned),
    )
