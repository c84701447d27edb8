"""From a checkpoint to a folder that Hugging Face's transformers loads, and back.

python tools/convert_checkpoint.py --to hf --load runs/a --save exported/a
python tools/convert_checkpoint.py --from hf --load Qwen3-0.6B --save runs/qwen3

A Qwen3 model with attention residuals that compute the same as its own at first, to be trained on:

python tools/convert_checkpoint.py --from hf --load Qwen3-0.6B --save runs/qwen3_blocks \\
    --attn-res-mode block --attn-res-num-blocks 8
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.commands import CommandParser, print_summary, run_command, whole_number
from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.flags import add_tokenizer_flags, tokenizer_of
from megatron_attnres.interop.folders import check_new_folder
from megatron_attnres.interop.requested import DEFAULT_RECENCY_BIAS, FLAGS, requested
from megatron_attnres.interop.source import find_source
from megatron_attnres.training.checkpoints.stored_model import find_stored_model
from megatron_attnres.training.checks import flag, required

if TYPE_CHECKING:
    from megatron_attnres.interop.report import Converted

OF_EXPORT = ("dtype", "tokenizer_model", "vocab_size")


def main(args: Sequence[str]) -> None:
    """Read the flags, convert, print.

    Raises:
        InputError: flags that do not fit each other, or a source that cannot be converted.
    """
    arguments = _parser().parse_args(args)
    load, save = required(arguments, "load"), required(arguments, "save")
    if (arguments.to is None) == (arguments.source is None):
        raise InputError("--to hf or --from hf: give one of the two")
    check_new_folder(save)
    converted = (_import if arguments.to is None else _export)(arguments, load, save)
    print_summary(converted, arguments.json)


def _export(arguments: argparse.Namespace, load: str, save: str) -> "Converted":
    _refuse(arguments, FLAGS, "--from hf")
    stored = find_stored_model(load)

    # Only now: torch takes seconds to load.
    from megatron_attnres.interop.exporting import export_checkpoint

    return export_checkpoint(
        stored, save, arguments.dtype, tokenizer_of(arguments), not arguments.without_tokenizer
    )


def _import(arguments: argparse.Namespace, load: str, save: str) -> "Converted":
    _refuse(arguments, OF_EXPORT, "--to hf")
    source = find_source(load)
    attn_res = requested(arguments, source)

    from megatron_attnres.interop.importing import import_checkpoint

    return import_checkpoint(source, save, attn_res, not arguments.without_tokenizer)


def _refuse(arguments: argparse.Namespace, names: Sequence[str], direction: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        if value is not None:
            raise InputError(f"{flag(name)} {value}: is for {direction}; leave it out")


def _parser() -> CommandParser:
    parser = CommandParser(
        "Convert a checkpoint to a folder of Hugging Face's transformers, or back.",
        epilog="A model with standard residuals becomes a plain Qwen3 model. One with attention "
        "residuals brings a modeling file of its own: AutoModelForCausalLM.from_pretrained(DIR, "
        "trust_remote_code=True).",
    )
    group = parser.add_argument_group("what to convert")
    add = group.add_argument
    add("--to", choices=["hf"], help="from a checkpoint to a Hugging Face folder")
    add(
        "--from",
        dest="source",
        choices=["hf"],
        help="from a Hugging Face folder (safetensors; Qwen3, what --to hf made, or the open "
        "reproduction qwen3_attnres) to a checkpoint",
    )
    add(
        "--load",
        metavar="DIR",
        help="with --to: a run's folder or a checkpoint, of any layout; with --from: the model's "
        "folder",
    )
    add("--save", metavar="DIR", help="folder to make; must not exist or be empty")
    add("--without-tokenizer", action="store_true", help="convert the model alone")
    add("--json", action="store_true", help="print one JSON object")
    _add_export_flags(parser)
    _add_import_flags(parser)
    return parser


def _add_export_flags(parser: CommandParser) -> None:
    group = parser.add_argument_group("with --to hf")
    group.add_argument(
        "--dtype",
        choices=["fp32", "bf16"],
        help="of the tensors; not given: that in which the model computed",
    )
    add_tokenizer_flags(parser)


def _add_import_flags(parser: CommandParser) -> None:
    group = parser.add_argument_group("with --from hf, for a Qwen3 model")
    add = group.add_argument
    add(
        "--attn-res-mode",
        choices=["baseline", "block", "full"],
        help="residual connections to give it; baseline, the default, keeps its own",
    )
    size = whole_number(1)
    add("--attn-res-num-blocks", type=size, metavar="N", help="number of blocks (block mode)")
    add(
        "--attn-res-block-size",
        type=size,
        metavar="S",
        help="sublayers per block (block mode; 8 blocks if neither is given)",
    )
    add(
        "--attn-res-recency-bias",
        type=float,
        metavar="FLOAT",
        help="bias on the newest source at first; the larger, the closer to the model as it was, "
        f"and the slower to leave it; {DEFAULT_RECENCY_BIAS:g} if not given",
    )


if __name__ == "__main__":
    run_command(main)
