"""What a trained model's readers attend to in depth, measured over a text and drawn.

python tools/plot_depth_attention.py --load runs/a --data-path runs/a/corpus --output weights
python tools/plot_depth_attention.py --load runs/a --text novel.txt --output weights
python tools/plot_depth_attention.py --load runs/a --prompt "def add(a, b):" --output weights
"""

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.analysis.depth.texts import (
    FEWEST_TOKENS,
    Text,
    text_of_corpus,
    text_of_files,
    text_of_prompt,
)
from megatron_attnres.commands import CommandParser, run_command, whole_number
from megatron_attnres.data.tokenizers import Tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.flags import JobFlags, add_tokenizer_flags, tokenizer_of
from megatron_attnres.output_files import check_output_folder
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.checkpoints.stored_model import StoredModel, find_stored_model

if TYPE_CHECKING:
    from megatron_attnres.analysis.depth.records import Measurement, TokenWeights


def main(args: Sequence[str]) -> None:
    """Read the flags and the text, measure, write, print.

    Raises:
        InputError: a flag, a checkpoint or a text that cannot be used.
    """
    arguments = _parser().parse_args(args)
    output = Path(arguments.output)
    _check_output(output)
    stored = find_stored_model(arguments.load)
    if stored.model.attn_res.mode == "baseline" and not arguments.magnitudes_only:
        raise InputError(
            f"--load {arguments.load}: is a baseline, which has no depth weights; add "
            "--magnitudes-only to measure the rest"
        )
    tokenizer = stored.open_tokenizer(tokenizer_of(arguments))
    text = _text(arguments, stored, tokenizer)
    measurement, tokens = _measure(arguments, stored, text)
    if not measurement.is_finite:
        raise InputError(
            f"--load {arguments.load}: computes numbers that are not finite; give a checkpoint "
            "from before it diverged"
        )

    from megatron_attnres.analysis.depth.described import Subject, measurement_json
    from megatron_attnres.analysis.depth.outputs import write_outputs
    from megatron_attnres.analysis.depth.token_texts import token_texts

    subject = Subject(stored, text.origin, measurement.tokens)
    texts = [] if tokens is None else token_texts(tokenizer, tokens.tokens)
    written = write_outputs(output, subject, measurement, tokens, texts)
    if arguments.json:
        print(json.dumps(measurement_json(subject, measurement)))
        return
    print(f"{subject.title}: {subject.about}")
    print(f"loss {measurement.magnitudes.loss:.4f} nats per token")
    print(f"{output}: {', '.join(path.name for path in written)}")


def _parser() -> CommandParser:
    parser = CommandParser(
        "Measure which sources a trained model's sublayers and head attend to, and how large its "
        "layers' outputs and gradients are; write numbers, pictures and a report.",
        epilog="Runs in one process, which holds the whole model.",
    )
    add = parser.add_argument
    add("--load", required=True, metavar="RUN", help="a run's folder, or a checkpoint")
    add("--output", required=True, metavar="DIR", help="folder to write to; made if missing")
    add(
        "--magnitudes-only",
        action="store_true",
        help="no depth weights: what can be measured of a baseline too",
    )
    add(
        "--precision",
        choices=["fp32", "bf16"],
        help="of parameters and activations; not given: as the model was trained",
    )
    add("--json", action="store_true", help="print what depth_weights.json holds")
    group = parser.add_argument_group("text", "one of --text, --data-path and --prompt")
    add = group.add_argument
    text = group.add_mutually_exclusive_group(required=True)
    text.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="files or folders of text: what tools/preprocess_data.py takes as --input",
    )
    text.add_argument(
        "--data-path", metavar="PREFIX", help="a .bin / .idx pair of the model's tokenizer"
    )
    text.add_argument("--prompt", metavar="TEXT", help="a text within the model's context")
    add(
        "--tokens",
        type=whole_number(FEWEST_TOKENS),
        default=16_384,
        metavar="N",
        help="of --text and --data-path, to average over",
    )
    add(
        "--shown-tokens",
        type=whole_number(1),
        default=128,
        metavar="N",
        help="first tokens of the text, within its first context, that are shown one by one",
    )
    add(
        "--batch-size",
        type=whole_number(1),
        default=4,
        metavar="B",
        help="contexts that are computed together",
    )
    add_tokenizer_flags(parser)
    return parser


def _check_output(folder: Path) -> None:
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"--output {folder}: is a file; give a folder, made if it is missing")
        check_output_folder("--output", str(folder), folder)
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise InputError(f"--output {folder}: {error.strerror}; give a folder") from None


def _text(arguments: argparse.Namespace, stored: StoredModel, tokenizer: Tokenizer) -> Text:
    model = stored.model
    if arguments.prompt is not None:
        return text_of_prompt(arguments.prompt, tokenizer, model.seq_length)
    if arguments.text is not None:
        return text_of_files(arguments.text, tokenizer, arguments.tokens)
    return text_of_corpus(arguments.data_path, tokenizer.vocab_size, arguments.tokens)


def _measure(
    arguments: argparse.Namespace, stored: StoredModel, text: Text
) -> "tuple[Measurement, TokenWeights | None]":
    """The text's means, and the weights of the tokens to show; None for magnitudes alone."""
    # Only now: torch takes seconds to load.
    from megatron_attnres.training.quiet import ignore_known_warnings

    ignore_known_warnings()
    from megatron_attnres.analysis.depth.layout import layout_of
    from megatron_attnres.analysis.depth.measure import measure, weights_of_tokens
    from megatron_attnres.analysis.depth.windows import windows_of
    from megatron_attnres.evaluation.job import build_trained, joined

    layout, context = layout_of(stored.model), stored.model.seq_length
    job = JobFlags(ParallelLayout(), arguments.precision, None, timedelta(minutes=10))
    with joined(job) as groups:
        module = build_trained(stored, groups, arguments.precision).chunks[0].module
        windows = windows_of(text.ids, context)
        with_weights = not arguments.magnitudes_only
        measurement = measure(module, layout, windows, arguments.batch_size, with_weights)
        if not with_weights:
            return measurement, None
        shown = text.ids[: min(context, arguments.shown_tokens)]
        return measurement, weights_of_tokens(module, layout, shown)


if __name__ == "__main__":
    run_command(main)
