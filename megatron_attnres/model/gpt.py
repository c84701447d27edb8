"""The GPT model as one chunk of a pipeline; a chunk that is first and last is the whole model."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_attnres.depth_attention.module import DepthAttention
from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.model.configuration import ModelConfig
from megatron_attnres.model.cross_entropy import vocab_parallel_cross_entropy
from megatron_attnres.model.dropout import EMBEDDING, HiddenDropout
from megatron_attnres.model.key_value_cache import KeyValueCache
from megatron_attnres.model.layer import depth_reader
from megatron_attnres.model.norm import RMSNorm
from megatron_attnres.model.rotary import rotary_tables
from megatron_attnres.model.stack import LayerStack
from megatron_attnres.parallel.parameters import (
    Initializer,
    Sharding,
    initialize_parameter,
    mark_partial_gradient,
    mark_sharded,
    mark_tied_across_stages,
    normal_initializer,
    scaled_normal_initializer,
)
from megatron_attnres.pipeline.plan import PipelinePlan
from megatron_attnres.pipeline.schedule import Recompute

EMBEDDING_NAME = "embedding.weight"
RESIDUAL_PROJECTIONS = ("attention.linear_proj.weight", "mlp.linear_fc2.weight")


class GPTChunk(nn.Module):
    """Embedding (first chunk), layers, output head and loss (last chunk).

    Args:
        model: sizes and residual connections.
        config: Megatron-Core's configuration of the same.
        groups: process groups.
        plan: the pipeline plan; the chunk's layers and block ends are read from it.
        chunk_index: c.
        seed: of the initial weights and of dropout.
        recompute: activation recomputation.
        device: of parameters and activations.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        plan: PipelinePlan,
        chunk_index: int,
        seed: int,
        recompute: Recompute,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.groups = groups
        self.is_first = chunk_index == 0
        self.is_last = chunk_index == len(plan.chunks) - 1
        self.baseline = model.attn_res.mode == "baseline"
        self.hidden_dropout = model.hidden_dropout
        self.seed = seed

        if self.is_first:
            self.embedding = _embedding(model, config, groups)
        self.layers = LayerStack(
            config,
            model.attn_res,
            groups,
            plan.chunks[chunk_index].layers,
            plan.ends_block,
            recompute,
        )
        if self.is_last:
            self.head_reader = depth_reader(config, model.attn_res)
            self.final_norm = RMSNorm(
                config.hidden_size, config.layernorm_epsilon, config.params_dtype
            )
            self.output = _output_layer(model, config, groups)
        self.output_is_tied = self.is_last and model.tied_embeddings
        if model.tied_embeddings:
            self._tie_embeddings()
        self._mark_sequence_parallel_parameters()
        self._initialize(model, seed)
        self.to(device)
        tables = rotary_tables(
            model.seq_length, model.kv_channels, model.rotary_base, config.params_dtype, device
        )
        self.register_buffer("rotary_cosines", tables[0], persistent=False)
        self.register_buffer("rotary_sines", tables[1], persistent=False)

    def forward(
        self,
        tokens: Tensor | None,
        state: DepthState | None,
        labels: Tensor | None,
        samples: Sequence[int] | None = None,
    ) -> Any:
        """Run the chunk on one micro-batch.

        Args:
            tokens: [b, s], read by the first chunk.
            state: the depth state from the chunk before; None for the first chunk.
            labels: [b, s], read by the last chunk.
            samples: the micro-batch's b samples by their place in the data order, for dropout;
                None drops nothing.

        Returns:
            The depth state after the chunk, or for the last chunk what ``result_of`` makes of it.
        """
        dropout = self._dropout(samples)
        if self.is_first:
            state = self._embed(tokens, dropout)
        rotary = (self.rotary_cosines, self.rotary_sines)
        state = self.layers(state, rotary, dropout=dropout)
        return self.result_of(state, labels) if self.is_last else state

    def run_layers(self, tokens: Tensor, cache: KeyValueCache) -> DepthState:
        """For inference with the whole model: the depth state of new tokens after all layers.

        Args:
            tokens: [b, s], which follow those of the cache.
            cache: keys and values of earlier tokens; takes those of the new ones.
        """
        rotary = (self.rotary_cosines, self.rotary_sines)
        return self.layers(self._embed(tokens), rotary, cache)

    def final_hidden(self, state: DepthState) -> Tensor:
        """What the output layer multiplies, [s, b, h] (s / TP under sequence parallelism)."""
        return self.final_norm(self.head_reader(state))

    def logits_of(self, state: DepthState) -> Tensor:
        """Of every position, [s, b, vocabulary / TP]."""
        return self.output(self.final_hidden(state))[0]

    def result_of(self, state: DepthState, labels: Tensor) -> Any:
        """What the last chunk gives back; a subclass may want something else of its state.

        Args:
            state: after all layers.
            labels: [b, s].

        Returns:
            The loss of every token, [b, s], in nats.
        """
        losses = vocab_parallel_cross_entropy(
            self.logits_of(state), labels.transpose(0, 1).contiguous(), self.groups.tp
        )
        return losses.transpose(0, 1)

    def global_name(self, name: str) -> str:
        """A parameter's name in the whole model; the tied copy carries the embedding's."""
        return EMBEDDING_NAME if name == "output.weight" and self.output_is_tied else name

    def _embed(self, tokens: Tensor, dropout: HiddenDropout | None = None) -> DepthState:
        hidden = self.embedding(tokens)
        if not self.config.sequence_parallel:
            # The sequence-parallel embedding has already turned [b, s, h] into [s / TP, b, h].
            hidden = hidden.transpose(0, 1).contiguous()
        if dropout is not None:
            hidden = dropout.drop(hidden, EMBEDDING)
        return DepthState((), hidden) if self.baseline else DepthState((hidden,), None)

    def _dropout(self, samples: Sequence[int] | None) -> HiddenDropout | None:
        if samples is None or self.hidden_dropout == 0:
            return None
        tp = self.groups.tp
        shard = (tp.rank(), tp.size()) if self.config.sequence_parallel else (0, 1)
        return HiddenDropout(self.hidden_dropout, self.seed, tuple(samples), *shard)

    def _tie_embeddings(self) -> None:
        """Use the embedding as output weight, or prepare its copy on another stage.

        The copy starts equal (it has the embedding's global name) and stays equal: its gradient
        and the embedding's are summed over both stages before every step.
        """
        if self.is_first and self.is_last:
            self.output.weight = self.embedding.weight
        elif self.is_first:
            mark_tied_across_stages(self.embedding.weight, copy=False)
        elif self.is_last:
            mark_tied_across_stages(self.output.weight, copy=True)

    def _mark_sequence_parallel_parameters(self) -> None:
        if not self.config.sequence_parallel:
            return
        for module in self.modules():
            if isinstance(module, RMSNorm | DepthAttention):
                for parameter in module.parameters(recurse=False):
                    mark_partial_gradient(parameter)

    def _initialize(self, model: ModelConfig, seed: int) -> None:
        for name, parameter in self.named_parameters():
            initializer = _initializer(name, model)
            if initializer is not None:
                initialize_parameter(
                    parameter,
                    self.global_name(name),
                    seed,
                    initializer,
                    self.groups.tp.rank(),
                    self.groups.tp.size(),
                )


def _embedding(
    model: ModelConfig, config: TransformerConfig, groups: ProcessGroupCollection
) -> VocabParallelEmbedding:
    embedding = VocabParallelEmbedding(
        model.vocab_size,
        model.hidden_size,
        init_method=config.init_method,
        reduce_scatter_embeddings=config.sequence_parallel,
        config=config,
        tp_group=groups.tp,
    )
    mark_sharded(embedding.weight, Sharding(0))
    return embedding


def _output_layer(
    model: ModelConfig, config: TransformerConfig, groups: ProcessGroupCollection
) -> ColumnParallelLinear:
    output = ColumnParallelLinear(
        model.hidden_size,
        model.vocab_size,
        config=config,
        init_method=config.init_method,
        bias=False,
        tp_group=groups.tp,
    )
    mark_sharded(output.weight, Sharding(0))
    return output


def _initializer(name: str, model: ModelConfig) -> Initializer | None:
    """Random start of a matrix; vectors keep the constants that their modules gave them."""
    if name.endswith(RESIDUAL_PROJECTIONS):
        return scaled_normal_initializer(model.init_method_std, model.num_layers)
    if name == EMBEDDING_NAME or name.endswith(("linear_qkv.weight", "linear_fc1.weight")):
        return normal_initializer(model.init_method_std)
    if name == "output.weight":
        return normal_initializer(model.init_method_std)
    return None
