"""From the flags about blocks to S, the sublayers of one."""

import argparse
import math

from megatron_attnres.errors import InputError

DEFAULT_NUM_BLOCKS = 8


def block_size_of(arguments: argparse.Namespace, num_sublayers: int) -> int:
    """S from whichever flag gives it; 1 in full mode.

    Args:
        arguments: with attn_res_mode, attn_res_num_blocks and attn_res_block_size.
        num_sublayers: L.

    Raises:
        InputError: both flags, a flag in a mode without blocks, or blocks that cannot be made.
    """
    _check_flags(arguments, num_sublayers)
    if arguments.attn_res_mode == "full":
        return 1
    if arguments.attn_res_block_size is not None:
        return arguments.attn_res_block_size
    asked = arguments.attn_res_num_blocks or min(DEFAULT_NUM_BLOCKS, num_sublayers)
    block_size = math.ceil(num_sublayers / asked)
    made = math.ceil(num_sublayers / block_size)
    if arguments.attn_res_num_blocks is not None and made != asked:
        raise InputError(
            f"--attn-res-num-blocks {asked}: {num_sublayers} sublayers cannot be cut into {asked} "
            f"blocks of equal size; {block_size} sublayers per block make {made}, "
            f"{block_size - 1} make {math.ceil(num_sublayers / max(block_size - 1, 1))}"
        )
    return block_size


def _check_flags(arguments: argparse.Namespace, num_sublayers: int) -> None:
    blocks, size = arguments.attn_res_num_blocks, arguments.attn_res_block_size
    mode = arguments.attn_res_mode
    if blocks is not None and size is not None:
        raise InputError(
            f"--attn-res-num-blocks {blocks} and --attn-res-block-size {size}: give one of the two"
        )
    for name, value in (("num-blocks", blocks), ("block-size", size)):
        if value is None:
            continue
        if mode != "block":
            raise InputError(
                f"--attn-res-{name} {value}: only --attn-res-mode block has blocks, not {mode}"
            )
        if not 1 <= value <= num_sublayers:
            raise InputError(
                f"--attn-res-{name} {value}: must be from 1 to the model's {num_sublayers} "
                "sublayers"
            )
