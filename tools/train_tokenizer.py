"""Train a SentencePiece tokenizer on text or source code, so that every text comes back exactly.

python tools/train_tokenizer.py --input corpus/ --output tokenizer.model --vocab-size 4096
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.commands import CommandParser, print_summary, run_command, whole_number
from megatron_attnres.data.commands import add_corpus_flags, corpus_of, progress_bar


def main(args: Sequence[str]) -> None:
    """Read the flags, train, print the summary."""
    parser = CommandParser(
        "Train a SentencePiece tokenizer. Every text can be encoded by it and "
        "comes back exactly: white space is kept, rare characters are bytes."
    )
    add_corpus_flags(parser)
    group = parser.add_argument_group("what to make")
    group.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="the model file; .model is appended if missing",
    )
    group.add_argument(
        "--vocab-size",
        type=whole_number(1),
        default=4096,
        help="number of token ids, the 256 bytes and special pieces included",
    )
    group.add_argument(
        "--model-type",
        choices=["bpe", "unigram"],
        default="bpe",
        help="SentencePiece's algorithm; unigram takes about ten times as long",
    )
    group.add_argument(
        "--max-bytes",
        type=whole_number(1),
        default=8_000_000,
        help="train on at most this many bytes of text, lines sampled evenly over the corpus",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="print the summary as one JSON object; tokens and bytes_per_token are the sample's",
    )
    arguments = parser.parse_args(args)

    from megatron_attnres.data.tokenizer_training import train_tokenizer

    corpus = corpus_of(arguments)
    with progress_bar(corpus, "reading") as progress:
        summary = train_tokenizer(
            corpus,
            arguments.output,
            arguments.vocab_size,
            arguments.model_type,
            arguments.max_bytes,
            progress,
        )
    print_summary(summary, arguments.json)


if __name__ == "__main__":
    run_command(main)
