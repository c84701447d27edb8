"""SwiGLU over Megatron-Core's tensor-parallel projections."""

import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_attnres.parallel.parameters import Sharding, mark_sharded


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Gate and up projection are one matrix, gate on top; each is sliced on its own (stride 2), so
    that every tensor-parallel rank holds matching columns of both.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            2 * config.ffn_hidden_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            stride=2,
            tp_group=groups.tp,
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn_hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=groups.tp,
        )
        mark_sharded(self.linear_fc1.weight, Sharding(0, stride=2))
        mark_sharded(self.linear_fc2.weight, Sharding(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """[s, b, h] (s / TP under sequence parallelism) in and out."""
        both, _ = self.linear_fc1(hidden)
        gate, up = both.chunk(2, dim=-1)
        output, _ = self.linear_fc2(F.silu(gate) * up)
        return output
