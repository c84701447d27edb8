"""Power laws of loss over compute, fitted to runs, and what one curve has over another.

python tools/fit_scaling_law.py runs/laptop --output runs/laptop/law
python tools/fit_scaling_law.py --csv examples/scaling/paper_table2.csv --form power --at 5.6
python tools/fit_scaling_law.py --constants baseline=1.891,0.057 block=1.870,0.058 --at 5.6
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.analysis.scaling_laws.fits.cautions import cautions_of
from megatron_attnres.analysis.scaling_laws.fits.given_laws import given_advantages, parse_laws
from megatron_attnres.analysis.scaling_laws.fits.power_law import Form
from megatron_attnres.analysis.scaling_laws.fits.study import (
    Measurements,
    Question,
    reference_of,
    study_of,
)
from megatron_attnres.analysis.scaling_laws.measurements.collecting import LossKind
from megatron_attnres.analysis.scaling_laws.measurements.measuring import (
    measured_in_csv,
    measured_in_sweeps,
)
from megatron_attnres.analysis.scaling_laws.report import factor_text, report_lines, study_json
from megatron_attnres.commands import CommandParser, run_command, whole_number
from megatron_attnres.errors import InputError
from megatron_attnres.output_files import check_output_file, check_output_folder
from megatron_attnres.training.sweeps.planning.budgets import FLOPS_PER_PFLOPS_DAY, flops_of

FORMS = {"power": (Form.POWER,), "offset": (Form.OFFSET,), "both": (Form.POWER, Form.OFFSET)}
FEWEST_RESAMPLES = 100
# PFLOP/s-days: from a FLOP to more than anybody will have.
SMALLEST_COMPUTE, LARGEST_COMPUTE = 1e-20, 1e20


def main(args: Sequence[str]) -> None:
    """Collect the points, fit, compare, write, print.

    Raises:
        InputError: flags that do not go together, runs or files that cannot be used.
    """
    arguments = _parser().parse_args(args)
    _check(arguments)
    if arguments.constants:
        _print_given(arguments)
        return
    question = Question(
        FORMS[arguments.form],
        arguments.baseline,
        _compute_of(arguments.at),
        arguments.resamples,
        arguments.seed,
    )
    study = study_of(_measurements(arguments), question)
    cautions = cautions_of(study)
    if arguments.output is not None:
        from megatron_attnres.analysis.scaling_laws.outputs import write_study

        for path in write_study(Path(arguments.output), study, cautions):
            print(f"written: {path}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(study_json(study, cautions)))
    else:
        print("\n".join(report_lines(study, cautions)))


def _parser() -> CommandParser:
    parser = CommandParser(
        "Fit L = A C^-alpha and L = E + A C^-alpha to the validation losses of runs, robustly, "
        "with 95 % intervals, and say how much more compute the baseline needs to be as good.",
        epilog="C is in PFLOP/s-days (8.64e19 FLOPs), L in nats per token. Nothing is left out "
        "silently: runs that are not finished, diverged or were measured differently are an error "
        "until --exclude names them.",
    )
    source = parser.add_argument_group("points, one of")
    add = source.add_argument
    add("sweeps", nargs="*", metavar="SWEEP", help="folder that launch_sweep.py run wrote to")
    add(
        "--csv",
        nargs="+",
        metavar="FILE",
        help="columns curve, size, loss, seed if known, and one of flops and pflop_s_days",
    )
    add(
        "--constants",
        nargs="+",
        metavar="NAME=A,ALPHA[,E]",
        help="no points: compare these laws, A in PFLOP/s-days",
    )
    choice = parser.add_argument_group("which runs")
    add = choice.add_argument
    add(
        "--loss",
        choices=[str(kind) for kind in LossKind],
        help="of a sweep's runs: the last validation loss (final), and only where the learning "
        "rate has decayed to a tenth of its highest (decayed) (default: decayed)",
    )
    add(
        "--exclude",
        nargs="+",
        metavar="PATTERN",
        help="leave runs out, by name, of a CSV also by curve or SIZE-CURVE, with * and ?",
    )
    add(
        "--best-learning-rate",
        action="store_true",
        help="of several learning rates of one curve and size, take that of the lowest loss",
    )
    question = parser.add_argument_group("what is fitted")
    add = question.add_argument
    add("--form", choices=list(FORMS), default="both", help="power: A C^-alpha; offset: with E")
    add("--baseline", metavar="CURVE", help="compare with it (default: baseline, or the first)")
    add(
        "--at",
        metavar="C",
        help='compute of the advantage, in PFLOP/s-days or with a unit: "4e13 FLOPs" '
        "(default: the most that both curves reach)",
    )
    add("--resamples", type=whole_number(FEWEST_RESAMPLES, 10**5), default=400, help="of intervals")
    add("--seed", type=whole_number(0), default=1, help="of the resamples")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output",
        metavar="DIR",
        help="write scaling_law.png, .json and .md, and points.csv, which --csv reads again",
    )
    output.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _check(arguments: argparse.Namespace) -> None:
    """Flags that do not go together; before anything is read."""
    sources = {
        "SWEEP": arguments.sweeps,
        "--csv": arguments.csv,
        "--constants": arguments.constants,
    }
    given = [name for name, values in sources.items() if values]
    if len(given) != 1:
        found = " and ".join(given) or "no points"
        raise InputError(f"{found}: give one of SWEEP, --csv and --constants")
    only_of_runs = {
        "--loss": arguments.loss is not None,
        "--best-learning-rate": arguments.best_learning_rate,
    }
    only_of_points = {
        "--exclude": arguments.exclude is not None,
        "--output": arguments.output is not None,
    }
    refused = only_of_runs if arguments.csv else {}
    refused = only_of_runs | only_of_points if arguments.constants else refused
    for flag, is_given in refused.items():
        if is_given:
            raise InputError(f"{flag}: says nothing with {given[0]}; leave it out")
    if arguments.constants and arguments.at is None:
        raise InputError("--constants: have no points that say at which compute; add --at")
    if arguments.output is not None:
        _check_output(arguments.output, arguments.csv)
    _compute_of(arguments.at)


def _check_output(path: str, csv: Sequence[str] | None) -> None:
    folder = Path(path)
    check_output_folder("--output", path, folder)
    for name in ("scaling_law.png", "scaling_law.json", "scaling_law.md", "points.csv"):
        check_output_file("--output", str(folder / name))
    points = (folder / "points.csv").resolve()
    if any(Path(one).resolve() == points for one in csv or ()):
        raise InputError(f"--output {path}: its points.csv is read here; give another folder")


def _compute_of(text: str | None) -> float | None:
    """PFLOP/s-days."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = flops_of(text, "--at") / FLOPS_PER_PFLOPS_DAY
    if not SMALLEST_COMPUTE <= value <= LARGEST_COMPUTE:
        raise InputError(
            f"--at {text}: give {SMALLEST_COMPUTE:g} to {LARGEST_COMPUTE:g} PFLOP/s-days"
        )
    return value


def _measurements(arguments: argparse.Namespace) -> Measurements:
    exclude = arguments.exclude or []
    if arguments.csv:
        return measured_in_csv([Path(path) for path in arguments.csv], exclude)
    kind = LossKind(arguments.loss or LossKind.DECAYED)
    folders = [Path(path) for path in arguments.sweeps]
    return measured_in_sweeps(folders, kind, exclude, arguments.best_learning_rate)


def _print_given(arguments: argparse.Namespace) -> None:
    laws = parse_laws(arguments.constants)
    if len(laws) < 2:
        raise InputError("--constants: a single law has none to compare with; give two or more")
    reference = reference_of(list(laws), arguments.baseline)
    compute = _compute_of(arguments.at)
    found = given_advantages(laws, reference, compute)
    if arguments.json:
        values = [asdict(one) for one in found]
        for one in values:
            one["factor"] = one["factor"] if math.isfinite(one["factor"]) else None
        print(json.dumps({"advantages": values}))
        return
    for one in found:
        print(
            f"{one.curve} over {one.reference} at {one.compute:g} PFLOP/s-days: "
            f"{factor_text(one.factor)} (loss {one.loss:.4f} against {one.reference_loss:.4f})"
        )


if __name__ == "__main__":
    run_command(main)
