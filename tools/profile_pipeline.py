"""Records what every stage of a pipeline computes, sends and waits for, and reports it.

python tools/profile_pipeline.py runs/profile --profile-pipeline 4:6 -- \\
    --config examples/quickstart.yaml --train-iters 6    # runs pretrain_attnres.py with these flags
python tools/profile_pipeline.py runs/profile            # reports what a run has recorded
"""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.commands import CommandParser, run_command
from megatron_attnres.errors import InputError
from megatron_attnres.pipeline.timeline.output import (
    PICTURE,
    REPORT,
    TIMELINES,
    TRACE,
)
from megatron_attnres.pipeline.timeline.report import report_table, timelines_report
from megatron_attnres.pipeline.timeline.timeline_file import read_timelines

# The job knows what to do with them: stop its ranks, or save first (--save-on-signal).
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
TRAIN = Path(__file__).resolve().parent.parent / "pretrain_attnres.py"


def main(args: Sequence[str]) -> None:
    """Read the flags, run the job if there is one, report."""
    own, training_flags = _split(args)
    arguments = _parser().parse_args(own)
    folder = Path(arguments.folder)
    try:
        is_folder = folder.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise InputError(f"{folder}: {error.strerror}; give a folder or file") from None
    if training_flags is not None:
        _run(folder, arguments, training_flags)
        is_folder = True
    elif arguments.profile_pipeline is not None:
        raise InputError(
            f"--profile-pipeline {arguments.profile_pipeline}: give the flags of the run after --"
        )
    timelines = read_timelines(folder / TIMELINES if is_folder else folder)
    if arguments.json:
        print(json.dumps(timelines_report(timelines)))
        return
    print(report_table(timelines))
    if is_folder:
        print(f"\n{folder}: {TRACE} (for ui.perfetto.dev), {PICTURE}, {TIMELINES}, {REPORT}")


def _split(args: Sequence[str]) -> tuple[Sequence[str], Sequence[str] | None]:
    """Our own flags, and those of the run behind ``--``."""
    if "--" not in args:
        return args, None
    where = list(args).index("--")
    return args[:where], args[where + 1 :]


def _parser() -> CommandParser:
    parser = CommandParser(
        "Record a pipeline's steps, or report what a run has recorded.",
        epilog="Behind -- follow the flags of pretrain_attnres.py, --nproc-per-node among them; on "
        "a cluster give --profile-pipeline and --profile-pipeline-dir to the job itself.",
    )
    parser.add_argument(
        "folder", metavar="DIR", help="what --profile-pipeline-dir names, or a timelines.json"
    )
    parser.add_argument(
        "--profile-pipeline",
        metavar="FROM:TO",
        help="iterations of the run to record, both included",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _run(folder: Path, arguments: argparse.Namespace, training_flags: Sequence[str]) -> None:
    """Train with the profile on; ends this command where training fails."""
    if arguments.profile_pipeline is None:
        raise InputError("--profile-pipeline is missing; give the iterations to record, FROM:TO")
    command = [
        sys.executable,
        str(TRAIN),
        *training_flags,
        f"--profile-pipeline={arguments.profile_pipeline}",
        f"--profile-pipeline-dir={folder}",
    ]
    before = _written_at(folder)
    status = _run_to_the_end(command)
    if status != 0:
        sys.exit(status)
    if _written_at(folder) == before:
        raise InputError(
            f"--profile-pipeline {arguments.profile_pipeline}: the run recorded nothing; it went "
            "on after these iterations (--load) or ended before them"
        )


def _run_to_the_end(command: Sequence[str]) -> int:
    """Run the job; it gets the signals that reach this command, and is waited for."""
    # What the run prints goes beside the report, not into it.
    # In a session of its own: a terminal's Ctrl-C reaches it through here, once.
    process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)

    def forward(number: int, frame: object) -> None:
        process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        status = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    # As a shell reports a signal.
    return status if status >= 0 else 128 - status


def _written_at(folder: Path) -> int | None:
    """When a profile was last written to a folder; None if never."""
    timelines = folder / TIMELINES
    return timelines.stat().st_mtime_ns if timelines.exists() else None


if __name__ == "__main__":
    run_command(main)
