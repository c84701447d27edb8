"""The learned part of depth attention: one pseudo-query and one key norm per reader."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from megatron_attnres.depth_attention.names import OperatorName
from megatron_attnres.depth_attention.one_token import (
    attend_to_summaries_of_token,
    inverse_rms_of_token,
    is_one_token,
    merge_partial_sum_of_token,
)
from megatron_attnres.depth_attention.operators import choose, read_with
from megatron_attnres.depth_attention.phase_one import attend_to_summaries
from megatron_attnres.depth_attention.phase_two import merge_partial_sum
from megatron_attnres.depth_attention.state import DepthState, ReadAhead
from megatron_attnres.depth_attention.statistics import inverse_rms, statistics_dtype

# A block's readers by layer, in order; None for those that run elsewhere.
BlockReaders = Sequence[Sequence["DepthAttention | None"]]


class DepthAttention(nn.Module):
    """Reads the depth state on behalf of one sublayer or of the output head.

    The pseudo-query starts at zero (equal weights), the key norm at one (paper section 3.1).
    Neither takes weight decay.

    Args:
        hidden_size: h.
        eps: of the key norm; the same as the model's norms.
        recency_bias: initial value of the learned scalar on the newest source; None leaves it out.
        dtype: data type of the parameters.
        operator: which implementation reads.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        recency_bias: float | None = None,
        dtype: torch.dtype = torch.float32,
        operator: OperatorName = "auto",
    ) -> None:
        super().__init__()
        self.eps = eps
        self.operator = operator
        self.query = nn.Parameter(torch.zeros(hidden_size, dtype=dtype))
        self.key_norm_weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.recency_bias: nn.Parameter | None = None
        if recency_bias is not None:
            self.recency_bias = nn.Parameter(torch.tensor([recency_bias], dtype=dtype))
        for parameter in self.parameters():
            parameter.no_weight_decay = True

    def look_ahead(self, state: DepthState, block: BlockReaders) -> DepthState:
        """Phase 1 for all readers of a block that run here; this one is the first.

        Args:
            state: what this reader will read.
            block: the block's readers.

        Returns:
            The state with what ``forward`` of each of them needs; as it was if it has that
            already, or if the operator reads on its own.
        """
        if state.ahead or self._chosen(state) != "two-phase":
            return state
        newest_bias = self.recency_bias if state.partial is None else None
        new = state.sources[len(state.inverse_rms) :]
        if is_one_token(state.sources[0]):
            readers = [reader for layer in block for reader in layer if reader is not None]
            directions = _directions(readers)
            wide = directions.dtype
            norms = (*state.inverse_rms, *(inverse_rms_of_token(s, self.eps, wide) for s in new))
            attended = attend_to_summaries_of_token(state.sources, norms, directions, newest_bias)
            ahead = tuple(map(ReadAhead, attended, directions.unbind()))
            return state._replace(inverse_rms=norms, ahead=ahead)
        directions, layers = _directions_by_layer(block)
        norms = (*state.inverse_rms, *(inverse_rms(source, self.eps) for source in new))
        found = attend_to_summaries(state.sources, norms, directions, newest_bias, layers)
        own = directions[layers[0].start : layers[-1].stop]
        ahead = tuple(map(ReadAhead, found.attended, own.unbind()))
        return DepthState(found.summaries, state.partial, norms, ahead)

    def forward(self, state: DepthState) -> Tensor:
        """The reader's input, [s, b, h]."""
        if not state.ahead:
            state = self.look_ahead(state, ((self,),))
        if not state.ahead:
            read = read_with(self._chosen(state))
            return read(
                state.readable(), self.query, self.key_norm_weight, self.eps, self.recency_bias
            )
        attended, direction = state.ahead[0]
        if state.partial is None:
            return attended.mixed
        merge = merge_partial_sum_of_token if is_one_token(state.partial) else merge_partial_sum
        return merge(attended, state.partial, direction, self.eps, self.recency_bias)

    def _chosen(self, state: DepthState) -> OperatorName:
        newest = state.sources[0]
        return choose(self.operator, newest.device, newest.dtype, self.recency_bias is not None)


class ResidualRead(nn.Module):
    """Baseline mode's reader: the residual stream as it is."""

    def look_ahead(self, state: DepthState, block: BlockReaders) -> DepthState:
        """There is nothing to prepare."""
        return state

    def forward(self, state: DepthState) -> Tensor:
        """The residual stream, [s, b, h]."""
        assert state.partial is not None, "the residual stream is missing from the depth state"
        return state.partial


def _directions(readers: Sequence[DepthAttention]) -> Tensor:
    """u = w g of every reader, [readers, h], in the data type of the statistics."""
    wide = statistics_dtype(readers[0].query.dtype)
    queries = torch.stack([reader.query for reader in readers]).to(wide)
    return queries * torch.stack([reader.key_norm_weight for reader in readers]).to(wide)


def _directions_by_layer(block: BlockReaders) -> tuple[Tensor, list[slice]]:
    """The directions of a block, zeros for readers of other chunks, and where each layer's lie."""
    readers = [reader for layer in block for reader in layer]
    places = [place for place, reader in enumerate(readers) if reader is not None]
    before, after = places[0], len(readers) - 1 - places[-1]
    own = _directions(readers[before : len(readers) - after])
    layers, start = [], 0
    for layer in block:
        stop = start + len(layer)
        if layer[0] is not None:
            layers.append(slice(start, stop))
        start = stop
    return pad(own, (0, 0, before, after)) if before or after else own, layers
