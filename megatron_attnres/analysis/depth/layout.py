"""Which sources a model has and which of them each of its readers reads. No torch.

The sources of a model are columns of a table, oldest first; a reader's sources are always the
first k columns. The partial sum of a block stands in the column that the block's summary will have.
Layers and blocks count from 1 here, as people do.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_attnres.model.configuration import ModelConfig
from megatron_attnres.pipeline.plan import PipelinePlan

Sublayer = Literal["attention", "mlp"]
# The head, where sublayers and layers are chosen or labelled.
HEAD = "head"
SUBLAYERS: tuple[Sublayer, ...] = ("attention", "mlp")
TITLES: dict[Sublayer, str] = {"attention": "pre-attention", "mlp": "pre-MLP"}
_SHORT: dict[Sublayer, str] = {"attention": "attn", "mlp": "mlp"}


@dataclass(frozen=True)
class Source:
    """One column.

    Attributes:
        name: ``embedding``, ``block 3``, or in full mode the sublayer, ``3 attn``.
        short: for narrow places: ``E``, ``3``, ``3a``.
    """

    name: str
    short: str


@dataclass(frozen=True)
class Reader:
    """A sublayer's read of the depth state, or the output head's.

    Attributes:
        layer: from 1; None for the head.
        sublayer: None for the head.
        sources: how many it reads, k.
        reads_partial: whether the last of them is the partial sum of the block being computed.
    """

    layer: int | None
    sublayer: Sublayer | None
    sources: int
    reads_partial: bool

    @property
    def name(self) -> str:
        """For people."""
        if self.layer is None:
            return "output head"
        return f"layer {self.layer}, {'attention' if self.sublayer == 'attention' else 'MLP'}"


@dataclass(frozen=True)
class DepthLayout:
    """Sources and readers of a model.

    Attributes:
        layers: number of layers.
        sources: oldest first. Empty for a baseline.
        readers: in the order in which they read, the head last. Empty for a baseline.
        block_ends: layers (from 1) in which a block ends, ascending.
    """

    layers: int
    sources: tuple[Source, ...]
    readers: tuple[Reader, ...]
    block_ends: tuple[int, ...]

    def of(self, sublayer: Sublayer) -> list[tuple[int, Reader]]:
        """The readers of a kind of sublayer and the head, with their places in ``readers``."""
        return [
            (place, reader)
            for place, reader in enumerate(self.readers)
            if reader.sublayer in (sublayer, None)
        ]


def layout_of(model: ModelConfig) -> DepthLayout:
    """The sources and readers of a model."""
    if model.attn_res.mode == "baseline":
        return DepthLayout(model.num_layers, (), (), ())
    plan = PipelinePlan((model.num_layers,), 1, model.attn_res.block_size)
    readers, complete, within = [], 1, False
    for sublayer in range(plan.num_sublayers):
        layer, kind = 1 + sublayer // 2, SUBLAYERS[sublayer % 2]
        readers.append(Reader(layer, kind, complete + within, within))
        within = not plan.ends_block(sublayer)
        complete += not within
    readers.append(Reader(None, None, complete, False))
    ends = sorted({1 + one // 2 for one in range(plan.num_sublayers) if plan.ends_block(one)})
    full = model.attn_res.mode == "full"
    return DepthLayout(model.num_layers, _sources(complete - 1, full), tuple(readers), tuple(ends))


def _sources(blocks: int, full: bool) -> tuple[Source, ...]:
    names = [Source("embedding", "E")]
    for block in range(blocks):
        if full:
            layer, kind = 1 + block // 2, _SHORT[SUBLAYERS[block % 2]]
            names.append(Source(f"{layer} {kind}", f"{layer}{kind[0]}"))
        else:
            names.append(Source(f"block {block + 1}", str(block + 1)))
    return tuple(names)
