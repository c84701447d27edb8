"""Before the first run of a sweep starts: what is planned, what is new, what would be refused.

No torch.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_attnres.errors import InputError
from megatron_attnres.training.configuration import read_configuration
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.sweeps.sweep_folder import SweepFolder

REPOSITORY = Path(__file__).resolve().parents[4]
TRAIN = REPOSITORY / "pretrain_attnres.py"


def extended_plan(
    folder: SweepFolder, known: Sequence[PlannedRun], planned: Sequence[PlannedRun]
) -> list[PlannedRun]:
    """The known runs in their order, then the new ones. Pure.

    Nothing is ever taken out or moved: a Slurm job finds its run by its place in the plan.

    Raises:
        InputError: a run of a known name is planned otherwise.
    """
    by_name = {run.name: run for run in known}
    for run in planned:
        if run.name in by_name:
            _check_same(folder, by_name[run.name], run)
    return [*known, *(run for run in planned if run.name not in by_name)]


def write_flags(folder: SweepFolder, run: PlannedRun) -> None:
    """Write the flags that a run is started with.

    Raises:
        InputError: they cannot be written.
    """
    folder.write(folder.flags(run.name), _as_yaml(run.flags))


def training_arguments(folder: SweepFolder, run: PlannedRun, flags: Path) -> list[str]:
    """Of pretrain_attnres.py: so that a run goes on after whatever ended it."""
    # One checkpoint is enough to go on from; a grid that keeps more says so.
    keep = [] if "keep-last" in run.flags else ["--keep-last", "1"]
    place = ["--config", str(flags), "--run-dir", str(folder.run(run.name).path)]
    return [*place, "--load", "auto", "--save-on-signal", *keep]


def check_runs(folder: SweepFolder, runs: Sequence[PlannedRun]) -> None:
    """Let pretrain's own checks look at what would be started: files, tokenizer, layout.

    Raises:
        InputError: what the first run that would be refused is refused for.
    """
    with tempfile.TemporaryDirectory() as place:
        flags = Path(place) / "flags.yaml"
        for run in runs:
            flags.write_text(_as_yaml(run.flags), encoding="utf-8")
            try:
                read_configuration(training_arguments(folder, run, flags))
            except InputError as error:
                reason = str(error).replace(f"--config {flags}: ", "")
                raise InputError(f"run {run.name}: {reason}") from None


def _check_same(folder: SweepFolder, known: PlannedRun, planned: PlannedRun) -> None:
    before, now = _flat(known), _flat(planned)
    # Validation at the end follows from the budget, which is what somebody changed.
    for name in sorted({**before, **now}, key=lambda name: name == "eval-interval"):
        if before.get(name) != now.get(name):
            raise InputError(
                f"--runs-dir {folder.path}: run {known.name} is planned there with {name} "
                f"{before.get(name)!r}, in the grid with {now.get(name)!r}; give another --runs-dir"
            )


def _flat(run: PlannedRun) -> dict[str, Any]:
    """Fields and flags by name, as they are after having been in a file; flags first."""
    content = json.loads(json.dumps(asdict(run)))
    return {**content.pop("flags"), **content}


def _as_yaml(flags: Mapping[str, Any]) -> str:
    import yaml

    # Through JSON: YAML has no tuples, and no anchors where two flags share a list.
    return yaml.safe_dump(json.loads(json.dumps(dict(flags))), sort_keys=False)
