"""What the data commands share: flags from a file, one-line errors, a progress bar, a summary."""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from megatron_attnres.data.corpora import Corpus
from megatron_attnres.data.readers import ALLOWED_NAMES
from megatron_attnres.errors import EXIT_STATUS_BAD_INPUT, InputError


class CommandParser(argparse.ArgumentParser):
    """An argument parser with ``--config``, whose complaints are InputErrors of one line."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument(
            "--config",
            metavar="FILE.yaml",
            type=Path,
            help="flags as YAML keys, without the dashes; flags given on the command line win",
        )

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parse ``args``, after the keys of the file that ``--config`` names, if any."""
        config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        config.add_argument("--config", type=Path)
        path = config.parse_known_args(args)[0].config
        from_file = self._flags_of(path) if path else []
        return super().parse_args([*from_file, *args])

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print below its usage."""
        raise InputError(f"{message}; see --help")

    def _flags_of(self, path: Path) -> list[str]:
        import yaml

        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"--config {path}: not readable YAML ({reason})") from None
        if not isinstance(values, dict):
            raise InputError(f"--config {path}: a mapping of flags to values is allowed")
        known = {
            option.removeprefix("--"): action
            for action in self._actions
            for option in action.option_strings
            if option.startswith("--") and option not in ("--help", "--config")
        }
        flags: list[str] = []
        for key, value in values.items():
            name = str(key).replace("_", "-")
            if name not in known:
                raise InputError(
                    f"--config {path}: unknown key {key!r}; allowed are {', '.join(sorted(known))}"
                )
            if isinstance(value, bool) and known[name].nargs == 0:
                # A flag without a value: present for true, its --no- twin, if any, for false.
                if value:
                    flags.append(f"--{name}")
                elif f"no-{name}" in known:
                    flags.append(f"--no-{name}")
            else:
                words = value if isinstance(value, list) else [value]
                flags += [f"--{name}", *map(str, words)]
        return flags


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, []):
            return action.help
        return super()._get_help_string(action)


def whole_number(smallest: int) -> Callable[[str], int]:
    """Return an argparse type: whole numbers of at least ``smallest``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = smallest - 1
        if number < smallest:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not allowed, a whole number of at least {smallest} is"
            )
        return number

    return parse


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


def print_summary(summary: Any, as_json: bool) -> None:
    """Print a summary dataclass, one field a line or as one JSON object."""
    values = asdict(summary)
    if as_json:
        print(json.dumps(values))
        return
    for name, value in values.items():
        text = f"{value:,.2f}" if isinstance(value, float) else value
        text = f"{value:,}" if isinstance(value, int) else text
        print(f"{name.replace('_', ' '):>16}  {text}")


def run_command(main: Callable[[Sequence[str]], None]) -> NoReturn:
    """Run ``main`` on the command line and exit.

    Bad input is one line and status 2. Ctrl-C and a request to end unwind what is under way, so
    that nothing half-written stays.
    """
    ended_by = signal.SIGINT

    def end(number: int, frame: Any) -> NoReturn:
        nonlocal ended_by
        ended_by = signal.Signals(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        main(sys.argv[1:])
    except InputError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(EXIT_STATUS_BAD_INPUT)
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted, nothing written", file=sys.stderr)
        sys.exit(128 + ended_by)  # as a shell reports a signal
    sys.exit(0)


def _print_beside_progress(message: str) -> None:
    from tqdm import tqdm

    tqdm.write(message, file=sys.stderr)
