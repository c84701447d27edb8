"""What the commands share: flags from a file, one-line errors, a summary. No torch."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from megatron_attnres.errors import (
    EXIT_STATUS_BAD_INPUT,
    EXIT_STATUS_FAILED,
    InputError,
    JoinError,
    LostRankError,
)


class CommandParser(argparse.ArgumentParser):
    """An argument parser with ``--config``, whose complaints are InputErrors of one line."""

    def __init__(self, description: str, epilog: str | None = None) -> None:
        super().__init__(
            description=description,
            epilog=epilog,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument(
            "--config",
            metavar="FILE.yaml",
            help="flags as YAML keys, without the dashes; flags given on the command line win",
        )

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parse ``args``, after the keys of the file that ``--config`` names, if any.

        Raises:
            InputError: an unknown flag or key, a value of the wrong type, a file that is no YAML.
        """
        config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        config.error = self.error  # type: ignore[method-assign]
        config.add_argument("--config")
        path = config.parse_known_args(args)[0].config
        self._check_known(args)
        from_file = self._flags_of(path) if path is not None else []
        return super().parse_args([*from_file, *args])

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print below its usage."""
        raise InputError(f"{message.removeprefix('argument ')}; see --help")

    def _check_known(self, args: Sequence[str]) -> None:
        """Name a misspelt flag rather than what is missing for want of it."""
        known = [option for action in self._actions for option in action.option_strings]
        for before, word in pairwise(["", *args]):
            if word == "--":
                return
            name = word.partition("=")[0]
            # A text with blanks behind a flag is its value, whatever it begins with.
            is_value = " " in name or (" " in word and before in known)
            if name.startswith("--") and not is_value and name not in known:
                near = get_close_matches(name, known, n=1)
                self.error(f"unrecognized arguments: {word}" + "".join(f", like {x}" for x in near))

    def _flags_of(self, path: str) -> list[str]:
        """The file's keys as flags, so that argparse checks both alike."""
        actions = {
            option.removeprefix("--"): action
            for action in self._actions
            for option in action.option_strings
            if option.startswith("--") and option not in ("--help", "--config")
        }
        flags: list[str] = []
        for key, value in _read_yaml(path).items():
            name = str(key).replace("_", "-")
            if name not in actions:
                known = ", ".join(sorted(actions))
                raise InputError(f"--config {path}: unknown key {key!r}; allowed are {known}")
            flags += _flag(path, name, value, actions[name])
        return flags


def _read_yaml(path: str) -> dict[str, Any]:
    # Loaded on use: most commands run without a file.
    from megatron_attnres.strict_yaml import read_strict_yaml

    content = read_strict_yaml(Path(path), f"--config {path}")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(
            f"--config {path}: holds a {type(content).__name__}; keys and values are allowed"
        )
    return content


def _flag(path: str, name: str, value: Any, action: argparse.Action) -> list[str]:
    if value is None:
        return []
    if "\0" in str(value):
        raise InputError(f"--config {path}: {name} is {value!r}; text without NUL is allowed")
    if action.nargs == 0:
        # A flag without a value: present for true; its --no- twin, if any, for false.
        if not isinstance(value, bool):
            raise InputError(f"--config {path}: {name} is {value!r}; allowed are true and false")
        off = f"--no-{name}"
        return [f"--{name}"] if value else [off] if off in action.option_strings else []
    if isinstance(value, list) and action.nargs == "+":
        return [f"--{name}", *map(str, value)]
    if isinstance(value, list | dict | bool):
        raise InputError(f"--config {path}: {name} is {value!r}; a single value is allowed")
    # One word, so that a negative number is not taken for a flag.
    return [f"--{name}={value}"]


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, []):
            return action.help
        return super()._get_help_string(action)


def whole_number(smallest: int, largest: int = 10**12) -> Callable[[str], int]:
    """Return an argparse type: whole numbers from ``smallest`` to ``largest``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = smallest - 1
        if number < smallest:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not allowed, a whole number of at least {smallest} is"
            )
        if number > largest:
            raise argparse.ArgumentTypeError(f"{text[:40]} is not allowed, at most {largest:,} is")
        return number

    return parse


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

    Bad input is one line and status 2; of the ranks of a host, which all end so, one says it.
    Ctrl-C and a request to end unwind what is under way, so that nothing half-written stays.
    """
    ended_by = signal.SIGINT

    def end(number: int, frame: Any) -> NoReturn:
        nonlocal ended_by
        ended_by = signal.Signals(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    # What a terminal has no character for, or a file's name that is no UTF-8, ends no command.
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has enough of it; Python would complain again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except InputError as error:
        if _is_first_of_host():
            _complain(str(error))
        sys.exit(EXIT_STATUS_BAD_INPUT)
    except JoinError as error:
        if _is_first_of_host():
            _complain(str(error))
        sys.exit(EXIT_STATUS_FAILED)
    except LostRankError as error:
        # Each says what it knows: the first one of the host may be the one that is gone.
        _complain(str(error))
        sys.exit(EXIT_STATUS_FAILED)
    except KeyboardInterrupt:
        if _is_first_of_host():
            _complain("interrupted, nothing written")
        sys.exit(128 + ended_by)  # as a shell reports a signal
    sys.exit(0)


def _is_first_of_host() -> bool:
    """Whether this rank, or the only process there is, speaks for all ranks of its host."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _complain(message: str) -> None:
    """One line, even if a name in it holds line ends."""
    line = message.replace("\n", "\\n").replace("\r", "\\r")
    print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr)
