"""The safetensors files of a Hugging Face folder: what they hold, tensor by tensor.

Nothing else is read: pickles (``pytorch_model.bin``) may run code.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_attnres.errors import InputError
from megatron_attnres.interop.hf_config import CONFIG_FILE
from megatron_attnres.interop.names import EMBEDDING, OUTPUT, Named, Shape

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# What float32 holds exactly.
_DATA_TYPES = ("F32", "BF16", "F16")
_NAMES_SHOWN = 10


class TensorFiles:
    """All tensors of a folder; each is read when it is asked for.

    Args:
        folder: of the model.

    Raises:
        InputError: no safetensors, a file that cannot be read, or numbers of another kind.
    """

    def __init__(self, folder: Path) -> None:
        self._paths: dict[str, Path] = {}
        self.shapes: dict[str, Shape] = {}
        self.data_types: dict[str, str] = {}
        for path in _files(folder):
            self._note(path)

    def read(self, name: str) -> Tensor:
        """A tensor, in float32.

        Raises:
            InputError: its file cannot be read.
        """
        path = self._paths[name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name).to(torch.float32)
        except (OSError, SafetensorError) as error:
            raise _unreadable(path, error) from error

    def check(self, expected: Sequence[Named], tied: bool) -> None:
        """Compare with what a model needs.

        Args:
            expected: its tensors.
            tied: whether it has no output layer of its own; a copy of the embedding is let pass.

        Raises:
            InputError: tensors are missing, or of another shape, or not of the model.
        """
        wanted = {one.name: one.shape for one in expected}
        if missing := wanted.keys() - self.shapes.keys():
            raise InputError(f"lacks {_listed(missing)}, which its {CONFIG_FILE} asks for")
        for name, shape in wanted.items():
            if self.shapes[name] != shape:
                found, needed = _shape(self.shapes[name]), _shape(shape)
                raise InputError(f"{name} is {found}; its {CONFIG_FILE} asks for {needed}")
        extra = self.shapes.keys() - wanted.keys()
        if tied and OUTPUT in extra:
            self._check_copy()
            extra -= {OUTPUT}
        if extra:
            raise InputError(f"holds {_listed(extra)}, which its {CONFIG_FILE} has no place for")

    def _check_copy(self) -> None:
        if not torch.equal(self.read(OUTPUT), self.read(EMBEDDING)):
            raise InputError(
                f"{OUTPUT} differs from {EMBEDDING}, though its {CONFIG_FILE} has "
                "tie_word_embeddings true; set it to false"
            )

    def _note(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_slice(name)
                    if name in self._paths:
                        raise InputError(f"{name} is in {self._paths[name]} and in {path}")
                    self._paths[name] = path
                    self.shapes[name] = tuple(tensor.get_shape())
                    self.data_types[name] = tensor.get_dtype()
        except (OSError, SafetensorError) as error:
            raise _unreadable(path, error) from error
        for name, kind in self.data_types.items():
            if kind not in _DATA_TYPES:
                raise InputError(
                    f"{name} is {kind}; tensors of {', '.join(_DATA_TYPES)} are allowed"
                )


def _files(folder: Path) -> list[Path]:
    """One, or those that the index names."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if (folder / SINGLE_FILE).is_file():
            return [folder / SINGLE_FILE]
        raise InputError(
            f"holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read, save the "
            "model as such"
        )
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
    ) as error:
        raise _unreadable(index, error) from error
    for name in names:
        # A file elsewhere is no part of the folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(f"{index.name} names {name!r}, which is no file of the folder")
        if not (folder / name).is_file():
            raise InputError(f"{index.name} names {name!r}, which is missing")
    return [folder / name for name in sorted(names)]


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"{path.name} cannot be read ({' '.join(str(error).split())})")


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    rest = len(names) - _NAMES_SHOWN
    shown = ", ".join(names[:_NAMES_SHOWN])
    return f"{shown} and {rest} more" if rest > 0 else shown


def _shape(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
