"""One posted send or receive, and the error that a lost peer becomes."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, distributed

from megatron_attnres.pipeline.messages import LaneKind, Message
from megatron_attnres.pipeline.waiting import WaitClock


class PipelineTransferError(RuntimeError):
    """A transfer did not complete: names message, lane and peer."""


class Transfer:
    """Posts a transfer and is the single owner of its wait.

    A gloo request may be waited for only once (a second wait blocks forever), and a schedule and
    a reader may both ask: so the request is waited for here, at most once.

    Args:
        message: what crosses.
        kind: of the lane.
        peer: global rank at the other end.
        tensor: the buffer; kept alive until the transfer is complete.
        post: hands the buffer to torch.distributed and returns its handle.
        sending: direction of this end, for the error.
        waits: times the wait.

    Raises:
        PipelineTransferError: the peer is gone.
    """

    def __init__(
        self,
        message: Message,
        kind: LaneKind,
        peer: int,
        tensor: Tensor,
        post: Callable[[], distributed.Work],
        sending: bool,
        waits: WaitClock,
    ) -> None:
        self.message = message
        self.tensor = tensor
        self._waits = waits
        self._what = (
            f"{message}, {kind} lane: {'send to' if sending else 'receive from'} rank {peer}"
        )
        with self._named_error():
            self._request: distributed.Work | None = post()

    def wait(self) -> Tensor:
        """Return the buffer when the transfer is complete.

        Raises:
            PipelineTransferError: the peer is gone or the process group's timeout has passed.
        """
        if self._request is not None:
            with self._named_error(), self._waits.waiting(self._what):
                self._request.wait()
            self._request = None
        return self.tensor

    def is_completed(self) -> bool:
        """Whether the transfer is over, without waiting."""
        return self._request is None or self._request.is_completed()

    @contextmanager
    def _named_error(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PipelineTransferError(f"{self._what} failed: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """What a backend says went wrong, in one line, without its source file and its advice."""
    first = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[/[^\]]*\]\s*", "", first).partition(". This is typically")[0]
