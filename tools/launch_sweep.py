"""Sweeps: many runs of one grid, planned, launched and looked after.

python tools/launch_sweep.py plan examples/scaling/laptop.yaml --tflops 0.04 --jobs 2
python tools/launch_sweep.py run examples/scaling/laptop.yaml --runs-dir runs/scaling --jobs 2
python tools/launch_sweep.py status runs/scaling --watch
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.commands import CommandParser, run_command, whole_number
from megatron_attnres.errors import EXIT_STATUS_FAILED, InputError
from megatron_attnres.training.sweeps.launching.launcher import (
    Launched,
    LaunchOptions,
    launch_sweep,
    read_queue,
)
from megatron_attnres.training.sweeps.launching.progress import (
    sweep_as_dict,
    sweep_lines,
    totals_line,
    trouble_lines,
)
from megatron_attnres.training.sweeps.launching.progress_view import ProgressView
from megatron_attnres.training.sweeps.launching.slurm import sbatch_options
from megatron_attnres.training.sweeps.launching.standing import Standing, with_dropped
from megatron_attnres.training.sweeps.launching.standing_reading import read_standings
from megatron_attnres.training.sweeps.planning.plan_table import plan_as_dict, plan_lines
from megatron_attnres.training.sweeps.planning.planner import plan_runs
from megatron_attnres.training.sweeps.planning.throughput import Throughput
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder

WATCH_SECONDS = 2.0
NOTHING_TO_DO = ("finished", "failed", "dropped")
SBATCH_OPTIONS = "--sbatch-options"


def main(args: Sequence[str]) -> None:
    """Run the subcommand that the first word names.

    Raises:
        InputError: there is no such subcommand, or what it says.
    """
    parser = CommandParser(
        "Plan, launch and look after the runs of a grid.",
        epilog="Every subcommand has a --help of its own.",
    )
    parser.add_argument("command", choices=list(COMMANDS), help="what to do")
    chosen = parser.parse_args(args[:1]).command
    COMMANDS[chosen](args[1:])


def plan(args: Sequence[str]) -> None:
    """Print the runs of a grid, what they cost and how long they take.

    Raises:
        InputError: a grid that cannot be planned, flags that do not go together.
    """
    arguments = _plan_parser().parse_args(args)
    throughput = _throughput(arguments)
    runs = plan_runs(Path(arguments.grid), arguments.vocab_size)
    if arguments.json:
        print(json.dumps(plan_as_dict(runs, throughput)))
    else:
        print("\n".join(plan_lines(runs, throughput)))


def _plan_parser() -> CommandParser:
    parser = CommandParser(
        "Print the runs of a grid with their parameters, tokens and FLOPs. Starts nothing.",
        epilog="FLOPs are those of model/flops.py: forward and backward of all matrix products, "
        "core attention and depth attention included. 1 PFLOP/s-day is 8.64e19 of them.",
    )
    parser.prog += " plan"
    add = parser.add_argument
    add("grid", metavar="GRID.yaml", help="sizes, modes, budgets, learning rates, seeds")
    add(
        "--vocab-size",
        type=whole_number(1),
        metavar="N",
        help="ids of the tokenizer, where its files are not at hand",
    )
    add(
        "--tflops",
        type=float,
        metavar="X",
        help="10^12 model FLOPs a second that one run reaches, all its ranks together; adds hours",
    )
    add("--jobs", type=whole_number(1), metavar="J", help="runs at a time, for the hours in total")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _throughput(arguments: argparse.Namespace) -> Throughput | None:
    if arguments.tflops is None:
        if arguments.jobs is not None:
            raise InputError(f"--jobs {arguments.jobs}: is for hours in total; add --tflops X")
        return None
    return Throughput(arguments.tflops, arguments.jobs or 1)


def run(args: Sequence[str]) -> None:
    """Do what is not done yet of a grid. Exits with 1 if a run is not finished at the end.

    Raises:
        InputError: see ``launch_sweep``; nothing was started then.
    """
    arguments = _run_parser().parse_args(_with_text_joined(args, SBATCH_OPTIONS))
    options = _launch_options(arguments)
    runs = plan_runs(Path(arguments.grid))
    view = ProgressView(sys.stdout)
    launched = launch_sweep(SweepFolder(Path(arguments.runs_dir)), runs, options, view)
    if not launched.is_queued:
        view.say("\n".join([totals_line(launched.standings), *trouble_lines(launched.standings)]))
    if launched.stopped_by is not None:
        view.say("stopped; call the same command again to go on")
        sys.exit(128 + launched.stopped_by)
    if _is_trouble(launched):
        sys.exit(EXIT_STATUS_FAILED)


def status(args: Sequence[str]) -> None:
    """Print how the runs of a sweep stand.

    Raises:
        InputError: the folder is no sweep's, or cannot be read.
    """
    arguments = _status_parser().parse_args(args)
    folder = SweepFolder(Path(arguments.folder))
    while True:
        standings = _standings(folder)
        if arguments.json:
            print(json.dumps(sweep_as_dict(standings)))
            return
        if arguments.watch and sys.stdout.isatty():
            print("\x1b[H\x1b[2J", end="")
        print("\n".join(sweep_lines(standings)), flush=True)
        if not arguments.watch or all(one.word in NOTHING_TO_DO for one in standings):
            return
        try:
            time.sleep(WATCH_SECONDS)
        except KeyboardInterrupt:
            # Whoever watches has seen enough.
            return


def _run_parser() -> CommandParser:
    parser = CommandParser(
        "Do the runs of a grid that are not done yet; call it again after whatever stopped it.",
        epilog="Finished runs are skipped, interrupted ones go on from their last checkpoint. "
        "Ctrl-C lets the runs save and end; if this command is killed they go on by themselves, "
        "and the next call finds them. Exit status: 0 when all runs are finished, 1 when some are "
        "not, 2 for bad input, 128 + signal when stopped; with --slurm 0 when submitted.",
    )
    parser.prog += " run"
    add = parser.add_argument
    add("grid", metavar="GRID.yaml", help="as for plan")
    add("--runs-dir", required=True, metavar="DIR", help="folder of the sweep, one below per run")
    add("--jobs", type=whole_number(1), default=1, metavar="J", help="runs at a time")
    add(
        "--threads",
        type=whole_number(1),
        metavar="T",
        help="CPU threads of a run, which its ranks share; the cores over --jobs if not given",
    )
    add("--retry-failed", action="store_true", help="start also runs that have failed")
    add("--slurm", action="store_true", help="submit a job array and return")
    add(
        SBATCH_OPTIONS,
        metavar="TEXT",
        help='further options of sbatch, as in "--partition=main --ntasks-per-node=2"',
    )
    return parser


def _with_text_joined(args: Sequence[str], flag: str) -> list[str]:
    """The flag and its text as one word: alone, a text that begins with dashes is taken for flags.

    The text's words are not looked at here, and may be anything.
    """
    joined, words = [], iter(args)
    for word in words:
        text = next(words, None) if word == flag else None
        joined.append(word if text is None else f"{flag}={text}")
    return joined


def _launch_options(arguments: argparse.Namespace) -> LaunchOptions:
    if arguments.slurm and arguments.threads is not None:
        raise InputError(
            f"--threads {arguments.threads}: is for runs on this machine; with --slurm give "
            '--sbatch-options "--cpus-per-task=N"'
        )
    if arguments.sbatch_options is not None and not arguments.slurm:
        raise InputError(f"--sbatch-options {arguments.sbatch_options!r}: add --slurm")
    cores = len(os.sched_getaffinity(0))
    return LaunchOptions(
        arguments.jobs,
        arguments.threads or max(1, cores // arguments.jobs),
        arguments.retry_failed,
        sbatch_options(arguments.sbatch_options or "") if arguments.slurm else None,
    )


def _is_trouble(launched: Launched) -> bool:
    """Whether something is not as it should be when the command ends."""
    if launched.is_queued:
        return any(one.word == "failed" for one in launched.standings)
    return any(one.word != "finished" for one in launched.standings)


def _status_parser() -> CommandParser:
    parser = CommandParser(
        "Print how the runs of a sweep stand, and why those failed that did.",
        epilog="Standings: finished (all iterations, and the validation loss after the last), "
        "running, waiting, interrupted (stopped, killed or lost; goes on with the next run), "
        "failed (has given a reason itself; see run --retry-failed), dropped (not finished, and no "
        "longer in the grid). Exit status: 0, whatever they are; 2 for bad input.",
    )
    parser.prog += " status"
    add = parser.add_argument
    add("folder", metavar="DIR", help="what --runs-dir named")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument(
        "--watch",
        action="store_true",
        help="print again every few seconds, until no run is left to do",
    )
    return parser


def _standings(folder: SweepFolder) -> list[Standing]:
    runs, dropped = folder.read_plan_and_dropped()
    try:
        queue = read_queue(folder, runs)
    except InputError as error:
        # The runs' folders tell nearly as much.
        print(f"{error}; what waits in the queue is not known", file=sys.stderr)
        queue = {}
    return with_dropped(read_standings(folder, runs, queue), dropped)


COMMANDS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "plan": plan,
    "run": run,
    "status": status,
}

if __name__ == "__main__":
    run_command(main)
