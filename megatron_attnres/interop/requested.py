"""Residual connections that flags ask of a model which has standard ones. No torch."""

import argparse

from megatron_attnres.errors import InputError
from megatron_attnres.interop.hf_config import QWEN3
from megatron_attnres.interop.source import HuggingFaceModel
from megatron_attnres.model.configuration import AttnResConfig
from megatron_attnres.training.blocks import block_size_of
from megatron_attnres.training.checks import LARGEST_PARAMETER, flag

# Every other source is left a weight of e^-16 = 1e-7, of the order of what float32 rounds away: at
# 64 layers in full mode logits of a random model move by 5e-5, of which rounding alone makes 2e-5.
DEFAULT_RECENCY_BIAS = 16.0
FLAGS = (
    "attn_res_mode",
    "attn_res_num_blocks",
    "attn_res_block_size",
    "attn_res_recency_bias",
)


def requested(arguments: argparse.Namespace, source: HuggingFaceModel) -> AttnResConfig | None:
    """How the imported model shall read from depth; None as the source does.

    Args:
        arguments: with the flags above, None where they were not given.
        source: of the weights.

    Raises:
        InputError: flags that do not fit each other or the source.
    """
    given = [name for name in FLAGS if getattr(arguments, name) is not None]
    if given and source.model_type != QWEN3:
        raise InputError(
            f"{flag(given[0])} {getattr(arguments, given[0])}: is for Qwen3 models; --load "
            f"{source.given} has attention residuals ({source.model_type}), which are kept"
        )
    if arguments.attn_res_mode in (None, "baseline"):
        for name in given:
            if name != "attn_res_mode":
                raise InputError(
                    f"{flag(name)} {getattr(arguments, name)}: needs --attn-res-mode block or full"
                )
        return None
    bias = arguments.attn_res_recency_bias
    if bias is not None and not abs(bias) <= LARGEST_PARAMETER:
        raise InputError(
            f"--attn-res-recency-bias {bias}: must be a finite number, within what float32 holds"
        )
    size = block_size_of(arguments, source.model.num_sublayers)
    return AttnResConfig(
        arguments.attn_res_mode,
        size,
        "cumulative",
        DEFAULT_RECENCY_BIAS if bias is None else bias,
    )
