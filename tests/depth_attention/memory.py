"""What an operation keeps for its backward, and the largest memory that it asks for at once."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestStorage(TorchDispatchMode):
    """Bytes of the largest storage behind any operation's result: a view counts as its base."""

    bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return result


@contextmanager
def kept_for_backward() -> Iterator[list[Tensor]]:
    """A list that the tensors that autograd saves meanwhile are added to."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def storage(tensor: Tensor) -> int:
    """What tensors of one memory have in common."""
    return tensor.untyped_storage().data_ptr()


def apart_from(tensors: Iterable[Tensor], known: Iterable[Tensor]) -> list[Tensor]:
    """Those that are no view of a known one."""
    known_storages = {storage(tensor) for tensor in known}
    return [tensor for tensor in tensors if storage(tensor) not in known_storages]
