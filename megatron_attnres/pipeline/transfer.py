"""One posted send or receive, and the error that a lost peer becomes."""

from torch import Tensor, distributed

from megatron_attnres.pipeline.messages import LaneKind, Message


class PipelineTransferError(RuntimeError):
    """A transfer did not complete: names message, lane and peer."""


class Transfer:
    """A posted transfer and the single owner of its wait.

    A gloo request may be waited for only once (a second wait blocks forever), and a schedule and
    a reader may both ask: so the request is waited for here, at most once.

    Args:
        message: what crosses.
        kind: of the lane.
        peer: global rank at the other end.
        tensor: the buffer; kept alive until the transfer is complete.
        request: torch.distributed's handle.
        sending: direction of this end, for the error.
    """

    def __init__(
        self,
        message: Message,
        kind: LaneKind,
        peer: int,
        tensor: Tensor,
        request: distributed.Work,
        sending: bool,
    ) -> None:
        self.message = message
        self.tensor = tensor
        self._request: distributed.Work | None = request
        self._what = (
            f"{message}, {kind} lane: {'send to' if sending else 'receive from'} rank {peer}"
        )

    def wait(self) -> Tensor:
        """Return the buffer when the transfer is complete.

        Raises:
            PipelineTransferError: the peer is gone or the process group's timeout has passed.
        """
        if self._request is not None:
            try:
                self._request.wait()
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise PipelineTransferError(f"{self._what} failed: {reason}") from error
            self._request = None
        return self.tensor

    def is_completed(self) -> bool:
        """Whether the transfer is over, without waiting."""
        return self._request is None or self._request.is_completed()
