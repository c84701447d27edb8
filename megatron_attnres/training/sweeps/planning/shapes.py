"""Models of about the same parameters and different shapes (paper figure 7). Pure, no torch.

hidden-per-layer:  hidden size / layers, a value or a list
heads-per-layer:   heads / layers, a value or a list
parameters:        of the baseline, without embedding and output layer
ffn-per-hidden:    FFN hidden size / hidden size

Every pair of the two ratios makes a shape. The number of layers is whole; for each number near the
one that both ratios and parameters ask for, the hidden size is the multiple of 8 that comes
nearest to the parameters, and the number whose hidden / layers is nearest to the ratio is taken.
Heads are rounded to a whole number, their width to the multiple of 8 nearest to hidden / heads, so
that the heads cut the hidden size and do not widen it; the FFN to a multiple of 8. A shape's name
tells the ratios that came out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_attnres.errors import InputError
from megatron_attnres.model.configuration import AttnResConfig, ModelConfig
from megatron_attnres.model.parameter_count import parameter_count
from megatron_attnres.training.sweeps.planning.grid_values import positive_number, values

RATIOS = ("hidden-per-layer", "heads-per-layer")
SHAPE_KEYS = (*RATIOS, "parameters", "ffn-per-hidden")
# Flags that a shape decides.
SIZE_FLAGS = (
    "model-size",
    "num-layers",
    "hidden-size",
    "ffn-hidden-size",
    "num-attention-heads",
    "num-query-groups",
    "kv-channels",
)
# Kernels of accelerators are fast, and some only run, on multiples of it.
MULTIPLE = 8
# Beyond it, a shape is refused: what is compared would no longer be the shape.
LARGEST_DEVIATION = 0.05
MOST_LAYERS = 10_000
# The same of the ratios, which whole layers and heads cannot always come near.
LARGEST_FACTOR = 1.25


@dataclass(frozen=True)
class Shape:
    """A solved shape; heads are not grouped.

    Attributes:
        num_layers: whole.
        hidden_size: a multiple of 8, as the two below.
        ffn_hidden_size: width of SwiGLU.
        kv_channels: width of one head.
        num_attention_heads: whole.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    kv_channels: int
    num_attention_heads: int

    @property
    def name(self) -> str:
        """With hidden size and heads per layer, as they came out."""
        return f"w{self.hidden_per_layer:.3g}h{self.heads_per_layer:.2g}"

    @property
    def hidden_per_layer(self) -> float:
        """As it came out."""
        return self.hidden_size / self.num_layers

    @property
    def heads_per_layer(self) -> float:
        """As it came out."""
        return self.num_attention_heads / self.num_layers

    @property
    def flags(self) -> dict[str, int]:
        """Flags of pretrain_attnres.py."""
        return {name.replace("_", "-"): value for name, value in vars(self).items()}

    @property
    def parameters(self) -> int:
        """Of the baseline, without embedding and output layer."""
        model = ModelConfig(
            **vars(self),
            num_query_groups=self.num_attention_heads,
            vocab_size=1,
            seq_length=1,
            attn_res=AttnResConfig("baseline"),
        )
        return parameter_count(model).non_embedding


def read_shapes(keys: Mapping[str, Any], shared: Mapping[str, Any], place: str) -> list[Shape]:
    """The shapes of a grid, hidden / layers outermost.

    Args:
        keys: below ``shapes`` in the grid.
        shared: flags of all runs.
        place: for errors.

    Raises:
        InputError: a key is missing or no number, a shared flag is a shape's to decide, a pair of
            ratios has no solution, or two have the same.
    """
    for name in SIZE_FLAGS:
        if name in shared:
            raise InputError(f"{place}: decides {name}, which flags has too; leave it out there")
    for key in SHAPE_KEYS:
        if key not in keys:
            raise InputError(f"{place}: has no {key}; give it")
    widths, heads = (values(keys[key], f"{place}.{key}", positive_number) for key in RATIOS)
    parameters = positive_number(keys["parameters"], f"{place}.parameters")
    ffn_ratio = positive_number(keys["ffn-per-hidden"], f"{place}.ffn-per-hidden")
    shapes: dict[str, Shape] = {}
    for width in widths:
        for head in heads:
            pair = f"{place}: hidden-per-layer {width:g} with heads-per-layer {head:g}"
            shape = solve_shape(width, head, parameters, ffn_ratio, pair)
            if shape.name in shapes:
                raise InputError(f"{pair}: comes out as {shape.name}, as another pair; drop one")
            shapes[shape.name] = shape
    return list(shapes.values())


def solve_shape(
    hidden_per_layer: float,
    heads_per_layer: float,
    parameters: float,
    ffn_per_hidden: float,
    place: str,
) -> Shape:
    """The shape nearest to two ratios at about the given parameters; see the top of this file.

    Args:
        hidden_per_layer: hidden size / layers.
        heads_per_layer: heads / layers.
        parameters: of the baseline, without embedding and output layer.
        ffn_per_hidden: FFN hidden size / hidden size.
        place: for the error.

    Raises:
        InputError: no whole numbers come within 5 % of the parameters and near the ratios.
    """
    # Layers x hidden^2 x this are the matrices: four of attention, three of SwiGLU.
    matrices = 4 + 3 * ffn_per_hidden
    exact = (parameters / matrices / hidden_per_layer**2) ** (1 / 3)
    if not exact < MOST_LAYERS:
        raise InputError(
            f"{place}: has no solution below {MOST_LAYERS:,} layers; give other ratios"
        )
    shapes = [
        _shape(layers, heads_per_layer, parameters / matrices, ffn_per_hidden)
        for layers in (math.floor(exact), math.floor(exact) + 1)
        if layers > 0
    ]
    fitting = [
        shape for shape in shapes if abs(shape.parameters / parameters - 1) <= LARGEST_DEVIATION
    ]
    if not fitting:
        raise InputError(
            f"{place}: has no solution within {LARGEST_DEVIATION:.0%} of {parameters:g} "
            "parameters; give other ratios or more parameters"
        )
    best = min(fitting, key=lambda shape: _factor(shape.hidden_per_layer, hidden_per_layer))
    if (
        _factor(best.hidden_per_layer, hidden_per_layer) > LARGEST_FACTOR
        or _factor(best.heads_per_layer, heads_per_layer) > LARGEST_FACTOR
    ):
        raise InputError(
            f"{place}: the nearest shape has {best.hidden_per_layer:.3g} hidden and "
            f"{best.heads_per_layer:.2g} heads per layer; give other ratios or more parameters"
        )
    return best


def _factor(found: float, asked: float) -> float:
    return max(found / asked, asked / found)


def _shape(layers: int, heads_per_layer: float, squares: float, ffn_per_hidden: float) -> Shape:
    """With layers x hidden^2 nearest to ``squares``."""
    hidden = _multiple(math.sqrt(squares / layers))
    heads = max(1, round(heads_per_layer * layers))
    return Shape(
        layers, hidden, _multiple(ffn_per_hidden * hidden), _multiple(hidden / heads), heads
    )


def _multiple(number: float) -> int:
    return max(1, round(number / MULTIPLE)) * MULTIPLE
