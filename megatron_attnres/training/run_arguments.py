"""The flags that decide what is kept of a run and who looks after it. No torch."""

import argparse


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add their groups."""
    for add_group in (
        _add_validation_and_logging,
        _add_checkpoints,
        _add_profiling,
        _add_watching,
    ):
        add_group(parser)


def _add_validation_and_logging(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("validation and logging")
    add = group.add_argument
    add("--eval-interval", type=int, help="iterations between validations; none if not given")
    add("--eval-iters", type=int, default=10, help="global batches per validation")
    add("--log-interval", type=int, default=1, help="iterations between progress updates")
    add("--metrics-file", metavar="FILE", help="JSON lines, one object per iteration")
    add("--tensorboard-dir", metavar="DIR", help="TensorBoard event files")
    add("--summary-file", metavar="FILE", help="JSON summary written at the end")


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    add = group.add_argument
    add("--save", metavar="DIR", help="folder to save to, at the end and every --save-interval")
    add("--save-interval", type=int, help="iterations between saves")
    add(
        "--async-save",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write while training goes on, where memory allows a copy of the rank's state",
    )
    add("--save-retries", type=int, default=2, help="failed saves in a row that the run survives")
    add("--keep-last", type=int, metavar="K", help="newest checkpoints to keep; all if not given")
    add("--keep-every", type=int, metavar="M", help="of older ones keep every M-th iteration's")
    add(
        "--load",
        metavar="DIR|latest|auto",
        help="folder or checkpoint to resume from, in any layout; latest: newest of --save; auto: "
        "newest whole one of --save, or a fresh start",
    )
    add(
        "--load-weights-only",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="take the weights of --load and start from iteration 0",
    )
    add(
        "--save-on-signal",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="on SIGTERM or SIGUSR1 finish the iteration, save, exit with 0 or "
        "--exit-status-when-stopped",
    )
    add(
        "--exit-duration-minutes",
        type=float,
        help="after so long finish the iteration, save (with --save), exit with 0",
    )
    add(
        "--exit-status-when-stopped",
        type=int,
        default=0,
        metavar="STATUS",
        help="instead of 0 when a signal or --exit-duration-minutes ends the run before "
        "--train-iters; lets a job script tell a stop, after which to go on, from the end",
    )


def _add_profiling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("profiling")
    add = group.add_argument
    add(
        "--profile-pipeline",
        metavar="FROM:TO",
        help="record what every stage computes, sends and waits for in these iterations, both "
        "included",
    )
    add(
        "--profile-pipeline-dir",
        metavar="DIR",
        help="where the recorded timelines, a Chrome trace, a report and pictures go",
    )


def _add_watching(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("watching")
    add = group.add_argument
    add(
        "--run-dir",
        metavar="DIR",
        help="folder of the run, on storage that all nodes share: metrics, TensorBoard and "
        "checkpoints, where no flag places them elsewhere; events, heartbeats and failure "
        "reports; tools/show_run.py reads it",
    )
    add(
        "--heartbeat-seconds",
        type=float,
        default=5.0,
        help="between two signs of life of every rank, in --run-dir",
    )
    add(
        "--max-skipped-steps",
        type=int,
        default=10,
        help="updates in a row that may be skipped for a loss or gradient that is not finite; one "
        "more ends the run with status 3",
    )
    add("--alarm-window", type=int, default=100, help="iterations that alarms compare with")
    add(
        "--loss-spike-deviations",
        type=float,
        default=6.0,
        help="alarm: a loss so many standard deviations above the window's median; 0: none",
    )
    add(
        "--grad-norm-alarm-ratio",
        type=float,
        default=10.0,
        help="alarm: a gradient norm so many times the window's median; 0: none",
    )
    add(
        "--straggler-interval",
        type=int,
        default=100,
        help="iterations after which slow ranks are named; 0: never",
    )
    add(
        "--straggler-ratio",
        type=float,
        default=1.5,
        help="a rank is slow that computes so many times as long as the fastest of its stage",
    )
    add(
        "--peak-tflops",
        type=float,
        help="10^12 operations a second of one accelerator, for MFU; known accelerators need no "
        "value under bf16",
    )
    add("--wandb-project", metavar="NAME", help="Weights & Biases project; needs the package wandb")
    add("--wandb-exp-name", metavar="NAME", help="of the run there")
    add(
        "--wandb-mode",
        choices=["online", "offline"],
        default="online",
        help="offline writes below --run-dir and needs no network",
    )
