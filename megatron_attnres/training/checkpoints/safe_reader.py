"""Reading checkpoints that may come from anywhere: no byte of them makes this process run code.

torch.distributed.checkpoint describes a checkpoint in a pickle, and an ordinary pickle may call
whatever it names. The one of a checkpoint needs few names; here it gets these and no others.
"""

import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from textwrap import shorten
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from torch.serialization import _get_layout

from megatron_attnres.errors import InputError

# What a pickle of a checkpoint makes without calling it, and fills.
_FILLED = (
    Metadata,
    TensorStorageMetadata,
    TensorProperties,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    _StorageInfo,
)
# How torch.load names what it refuses.
_REFUSED_BY_TORCH = re.compile(r"GLOBAL (\S+)")
_LONGEST_NAME = 100


class SafeReader(FileSystemReader):
    """Reads a checkpoint's folder; a file that asks for anything but numbers is refused."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description of all tensors; see the base class.

        Raises:
            InputError: the file cannot be read, is no such description, or names a class or
                function that a description has no need of.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        with named_if_unreadable(path), open(path, "rb") as file:
            metadata = _Unpickler(file, path).load()
            if not isinstance(metadata, Metadata):
                raise TypeError(f"it holds a {type(metadata).__name__}")
            if metadata.storage_meta is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the plan's tensors; see the base class.

        Raises:
            InputError: names the file and the tensor that cannot be read, and what else the file
                asks for, if that is why.
        """
        # Each alone, so that an error can name it.
        for item in plan.items:
            with named_if_unreadable(Path(self.path), item.storage_index.fqn):
                self._read_item(item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, item: ReadItem, planner: LoadPlanner) -> None:
        """The base class reads tensors by torch.load with ``weights_only=True``.

        Its unpickler builds tensors and calls nothing else that a file names.
        """
        name = item.storage_index.fqn
        if item.type is not LoadItemType.TENSOR:
            # Torch's planners would unpickle it freely.
            raise InputError(f"{self.path}: {name} is to be read as an object; tensors are allowed")
        path = _inside(Path(self.path), self.storage_data[item.storage_index].relative_path)
        with named_if_unreadable(path, name):
            super().read_data(LoadPlan([item]), planner).wait()


@contextmanager
def named_if_unreadable(path: Path, what: str = "it") -> Iterator[None]:
    """Pickles and archives fail in as many ways as bytes can be wrong: one line for all.

    Args:
        path: of the file or folder that is read.
        what: of it.

    Raises:
        InputError: the body failed.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        refused = _REFUSED_BY_TORCH.search(str(error))
        if isinstance(error, pickle.UnpicklingError) and refused:
            raise InputError(_asks_for(path, refused[1])) from error
        reason = shorten(f"{type(error).__name__}: {error}", 300)
        raise InputError(
            f"{path}: {what} cannot be read ({reason}); tools/inspect_checkpoint.py --verify "
            "names damaged files"
        ) from error


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows the names of a checkpoint's description alone."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for; see the base class, which would import anything.

        Raises:
            InputError: nothing here.
        """
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise InputError(_asks_for(self._path, f"{module}.{name}")) from None


class _Sealed(type):
    """Of classes that a pickle cannot change: it may set attributes of whatever it can name."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it changes a class: {name!r}")


def _stand_in(make: Callable[..., Any]) -> type:
    """A class that does nothing but call ``make``, whose results are not of this class."""

    class StandIn(metaclass=_Sealed):
        def __new__(cls, *arguments: Any) -> Any:
            return make(*arguments)

    return StandIn


def _memory_format(owner: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """Stands for ``getattr``, by which some releases of Python 3.11 pickle members of enums."""
    if owner is not _ENCODING:
        raise pickle.UnpicklingError("it asks for the attribute of an object")
    return _MEM_FORMAT_ENCODING[name]


def _asks_for(path: Path, name: str) -> str:
    # In quotes and cut: a file may name anything, line ends and control characters included.
    return (
        f"{path}: asks for {name[:_LONGEST_NAME]!r}, which no checkpoint needs and which might run "
        "code; use a checkpoint whose origin you know"
    )


def _inside(folder: Path, name: str) -> Path:
    """The path of a checkpoint's file, which has no business with files elsewhere."""
    if Path(name).name != name:
        raise InputError(
            f"{folder}: its description names {name[:_LONGEST_NAME]!r}, a file outside of the "
            "checkpoint; use a checkpoint whose origin you know"
        )
    return folder / name


# Torch's enum and the path of the folder while it was written, which is never opened.
_ENCODING = _stand_in(_MEM_FORMAT_ENCODING)
_PATH = _stand_in(PurePosixPath)

_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (made.__module__, made.__name__): _stand_in(partial(object.__new__, made))
        for made in _FILLED
    },
    **{("torch", name): dtype for name, dtype in vars(torch).items() if type(dtype) is torch.dtype},
    ("torch", "Size"): _stand_in(torch.Size),
    ("torch.serialization", "_get_layout"): _stand_in(_get_layout),
    (_MEM_FORMAT_ENCODING.__module__, _MEM_FORMAT_ENCODING.__name__): _ENCODING,
    ("builtins", "getattr"): _stand_in(_memory_format),
    ("pathlib", "PosixPath"): _PATH,
    # As Python 3.13 names it.
    ("pathlib._local", "PosixPath"): _PATH,
}
