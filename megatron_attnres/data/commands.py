"""What the data commands share: which text to read, a progress bar."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_attnres.commands import CommandParser
from megatron_attnres.data.corpora import Corpus
from megatron_attnres.data.readers import ALLOWED_NAMES


def add_corpus_flags(parser: CommandParser) -> None:
    """Add the flags that say which text to read."""
    group = parser.add_argument_group("what to read")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=f"{ALLOWED_NAMES} files, folders of them (searched to any depth, in the order of "
        "their names), or a folder written by datasets' save_to_disk. A .txt or .py file is one "
        "document. Text is UTF-8; a file that is not is named, counted and skipped",
    )
    group.add_argument(
        "--json-keys",
        default="text",
        metavar="KEY",
        help="the field of a JSON object, or the column of a table, that holds the document",
    )
    group.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="NAME",
        help="files and folders to pass by inside folders, by name or pattern: site-packages "
        "'*_test.py'",
    )


def corpus_of(arguments: argparse.Namespace) -> Corpus:
    """Return the corpus that the flags of ``add_corpus_flags`` describe."""
    return Corpus(
        arguments.input, arguments.json_keys, arguments.exclude, report=_print_beside_progress
    )


@contextmanager
def progress_bar(corpus: Corpus, description: str) -> Iterator[Callable[[int], None]]:
    """Show a bar over the bytes of ``corpus`` on disk; give the function that moves it.

    Only on a terminal, and not before half a second: an error that comes at once stands alone.
    """
    from tqdm import tqdm

    with tqdm(
        total=corpus.bytes_on_disk or None,
        desc=description,
        unit="B",
        unit_scale=True,
        disable=None,
        delay=0.5,
    ) as bar:

        def move(bytes_read: int) -> None:
            bar.update(bytes_read - bar.n)

        try:
            yield move
        except BaseException:
            bar.leave = False
            raise


def _print_beside_progress(message: str) -> None:
    from tqdm import tqdm

    tqdm.write(message, file=sys.stderr)
