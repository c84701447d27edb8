"""Save and resume in the same layout: one file per rank, a folder per iteration.

    DIR/iter_0000200/rank_00003.pt      parameters, optimizer, schedule of one rank
    DIR/latest                          name of the newest whole folder

A folder is written under a temporary name and renamed when every rank has written its file, so
what ``latest`` names is always whole.
"""

import os
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from megatron_attnres.errors import InputError
from megatron_attnres.parallel.agreement import same_error_on_all_ranks
from megatron_attnres.training.run_config import RunConfig

LATEST = "latest"


@dataclass
class TrainingState:
    """Where a run stands.

    Attributes:
        iteration: finished iterations.
        consumed_samples: sequences trained on.
        tokens: tokens trained on.
    """

    iteration: int = 0
    consumed_samples: int = 0
    tokens: int = 0


class Resumable:
    """What is saved and loaded: parameters, optimizer, schedule, position.

    Args:
        config: of the run; the parts that must match are stored beside the tensors.
        chunks: this rank's chunks.
        optimizer: this rank's optimizer.
        scheduler: learning-rate schedule.
    """

    def __init__(
        self, config: RunConfig, chunks: Sequence[nn.Module], optimizer: Any, scheduler: Any
    ) -> None:
        self._identity = _identity(config)
        self._chunks = chunks
        self._optimizer = optimizer
        self._scheduler = scheduler

    def save(self, folder: str, state: TrainingState) -> Path:
        """Write the state of all ranks. Collective; returns the new folder.

        Raises:
            InputError: the folder cannot be written.
        """
        final = Path(folder) / f"iter_{state.iteration:07d}"
        writing = final.with_suffix(".writing")
        try:
            with same_error_on_all_ranks():
                _write(writing / _rank_file(), self._content(state))
        except InputError:
            if distributed.get_rank() == 0:
                shutil.rmtree(writing, ignore_errors=True)
            raise
        with same_error_on_all_ranks():
            if distributed.get_rank() == 0:
                _publish(writing, final)
        return final

    def load(self, folder: str) -> TrainingState:
        """Continue from the newest checkpoint in a folder. Collective.

        Raises:
            InputError: there is none, a file is damaged, or it is of another model or layout.
        """
        with same_error_on_all_ranks():
            content = _read(_newest(folder) / _rank_file(), folder)
            _check_identity(folder, content["identity"], self._identity)
        for chunk, parameters in zip(self._chunks, content["chunks"], strict=True):
            chunk.load_state_dict(parameters)
        self._optimizer.load_state_dict(content["optimizer"])
        self._scheduler.load_state_dict(content["scheduler"])
        return TrainingState(**content["state"])

    def _content(self, state: TrainingState) -> dict[str, Any]:
        return {
            "identity": self._identity,
            "state": asdict(state),
            "chunks": [_tensors(chunk) for chunk in self._chunks],
            "optimizer": self._optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
        }


def _identity(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint and the run that loads it must have in common, flat, by name."""
    model = asdict(config.model)
    attn_res = model.pop("attn_res")
    # How it is computed, not what; and of a learned scalar only the presence shapes the model.
    del attn_res["operator"]
    attn_res["recency_bias"] = attn_res["recency_bias"] is not None
    return {
        **{f"model.{name}": value for name, value in model.items()},
        **{f"model.attn_res.{name}": value for name, value in attn_res.items()},
        **{f"layout.{name}": value for name, value in asdict(config.layout).items()},
        "optimizer.zero_stage": config.optimizer.zero_stage,
        "optimizer.precision": config.optimizer.precision,
        "loop.seed": config.loop.seed,
    }


def _check_identity(folder: str, saved: dict[str, Any], own: dict[str, Any]) -> None:
    for name, value in own.items():
        if saved.get(name) != value:
            raise InputError(
                f"--load {folder}: the checkpoint has {name} = {saved.get(name)}, the run has "
                f"{value}; resume with the model and layout that were saved"
            )


def _tensors(chunk: nn.Module) -> dict[str, torch.Tensor]:
    # Megatron-Core's layers add an empty extra state, which is no tensor.
    return {name: value for name, value in chunk.state_dict().items() if value is not None}


def _rank_file() -> str:
    return f"rank_{distributed.get_rank():05d}.pt"


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # RuntimeError: torch's own for a full disk
        raise _unwritable(path, error) from error


def _publish(writing: Path, final: Path) -> None:
    """Make a written folder the newest one."""
    try:
        if final.exists():
            shutil.rmtree(final)
        writing.rename(final)
        pointer = final.parent / (LATEST + ".writing")
        pointer.write_text(final.name + "\n", encoding="utf-8")
        pointer.replace(final.parent / LATEST)
    except OSError as error:
        raise _unwritable(final, error) from error


def _unwritable(path: Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or "cannot be written"
    return InputError(f"--save {path}: {reason}; give a writable folder with space")


def _newest(folder: str) -> Path:
    pointer = Path(folder) / LATEST
    if not pointer.is_file():
        raise InputError(f"--load {folder}: has no file {LATEST}; give a folder made by --save")
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    newest = Path(folder) / name
    if not name or not newest.is_dir():
        raise InputError(
            f"--load {folder}: {LATEST} names {name!r}, which is no folder in it; "
            "name one made by --save"
        )
    return newest


def _read(path: Path, folder: str) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(
            f"--load {folder}: {path.name} is missing; the checkpoint is of a job with other ranks"
        )
    try:
        # torch itself does not compare the sums that it writes.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        content = torch.load(path, map_location="cpu", weights_only=True)
        if damaged is None and content.keys() >= {"identity", "state", "chunks", "optimizer"}:
            return content
    except Exception:  # whatever zipfile, torch and pickle raise over foreign bytes
        pass
    raise InputError(
        f"--load {folder}: {path} is damaged or no checkpoint; give a folder made by --save"
    )
