"""Encode text into the .bin / .idx pair that training reads.

python tools/preprocess_data.py --input corpus/ --output-prefix data/corpus \\
    --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.commands import CommandParser, print_summary, run_command, whole_number
from megatron_attnres.data.commands import add_corpus_flags, corpus_of, progress_bar
from megatron_attnres.data.configuration import TokenizerConfig, TokenizerType


def main(args: Sequence[str]) -> None:
    """Read the flags, encode, print the summary."""
    parser = CommandParser("Encode text into Megatron-Core's indexed dataset, a .bin / .idx pair.")
    add_corpus_flags(parser)
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        choices=get_args(TokenizerType),
        default="SentencePieceTokenizer",
        help="NullTokenizer reads text that is token ids already, separated by blanks",
    )
    group.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="a SentencePiece .model file, or the folder of a Hugging Face tokenizer",
    )
    group.add_argument(
        "--vocab-size",
        type=whole_number(1),
        help="for NullTokenizer: number of ids; the next one ends documents",
    )
    group.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end every document with the end-of-document id",
    )
    group = parser.add_argument_group("what to make")
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_KEY_document.bin and .idx, KEY being that of --json-keys; "
        "PREFIX_KEY_document is what training takes as --data-path",
    )
    group.add_argument(
        "--workers",
        type=whole_number(1),
        default=len(os.sched_getaffinity(0)),
        help="processes that encode; the output does not depend on it",
    )
    group.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    arguments = parser.parse_args(args)

    from megatron_attnres.data.preprocess import preprocess

    corpus = corpus_of(arguments)
    tokenizer_config = TokenizerConfig(
        arguments.tokenizer_type, arguments.tokenizer_model, arguments.vocab_size
    )
    with progress_bar(corpus, "encoding") as progress:
        summary = preprocess(
            corpus,
            tokenizer_config,
            arguments.output_prefix,
            arguments.append_eod,
            arguments.workers,
            progress,
        )
    print_summary(summary, arguments.json)


if __name__ == "__main__":
    run_command(main)
