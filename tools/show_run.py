"""How runs stand, from what they write to their --run-dir: state, figures, alarms, curves.

python tools/show_run.py runs/a                        one run
python tools/show_run.py runs/* --plot curves.png      several, a line each, and their curves
python tools/show_run.py runs/a --state                one word, for scripts
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.commands import CommandParser, run_command
from megatron_attnres.errors import InputError
from megatron_attnres.output_files import check_output_file, write_output_file
from megatron_attnres.training.watching.run_contents import RunContents, read_run
from megatron_attnres.training.watching.run_report import alarm_lines, run_lines, runs_table
from megatron_attnres.training.watching.run_state import RunState, names_of, state_of


def main(args: Sequence[str]) -> None:
    """Read the folders, draw, print.

    Raises:
        InputError: a folder that is no run's or cannot be read, flags that do not go together, a
            picture that cannot be written.
    """
    arguments = _parser().parse_args(args)
    _check(arguments)
    paths = [Path(given) for given in arguments.runs]
    names, contents = names_of(paths), [read_run(path) for path in paths]
    now = time.time()
    states = [state_of(*run, now) for run in zip(names, contents, strict=True)]
    if arguments.plot is not None:
        _draw(arguments.plot, names, contents)
    if arguments.state:
        print(states[0].state)
    elif arguments.json:
        print(json.dumps({"runs": [state.as_dict() for state in states]}))
    else:
        print("\n".join(_lines(states, arguments.alarms)))


def _parser() -> CommandParser:
    parser = CommandParser(
        "Print how runs stand and what was alarming; draw their curves.",
        epilog="States: running, finished (all iterations are done), stopped (asked to, and can "
        "go on), failed (see the report), silent (started, and no heartbeat for a minute: killed, "
        "or its nodes are gone), gave up (too many updates skipped), not started. Exit status: 0, "
        "whatever the state; 2 for bad input.",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="folder that --run-dir named")
    add("--plot", metavar="FILE.png", help="draw losses, gradient norms and speed of all runs")
    add(
        "--alarms",
        action="store_true",
        help="print all alarms; else the last five of a single run, and of several none",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--state", action="store_true", help="print the state and nothing else")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    check_output_file("--plot", arguments.plot)
    if arguments.state and len(arguments.runs) > 1:
        raise InputError(f"--state: prints one word, but {len(arguments.runs)} runs; give one RUN")


def _draw(path: str, names: Sequence[str], contents: Sequence[RunContents]) -> None:
    from megatron_attnres.training.watching.curves import draw_curves, read_curves

    curves = [read_curves(*run) for run in zip(names, contents, strict=True)]
    write_output_file("--plot", path, lambda target: draw_curves(curves, target))
    print(f"written: {path}", file=sys.stderr)


def _lines(states: Sequence[RunState], all_alarms: bool) -> Iterator[str]:
    if len(states) == 1:
        yield from run_lines(states[0], all_alarms)
        return
    yield from runs_table(states)
    for state in states if all_alarms else ():
        yield f"\n{state.name}"
        yield from alarm_lines(state, None)


if __name__ == "__main__":
    run_command(main)
