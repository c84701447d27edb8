"""Where a sweep keeps what it writes. No torch.

SWEEP/sweep.json              the plan: every run, written before the first one starts
SWEEP/launcher.lock           held by the launcher that works on the sweep
SWEEP/lines.txt               the runs as examples/slurm/sweep.sbatch reads them
SWEEP/slurm-JOB_INDEX.log     what a run printed under Slurm
SWEEP/RUN/                    a run's folder, as in training/watching/run_folder.py, and in it
SWEEP/RUN/flags.yaml          the flags it was started with, as --config takes them
SWEEP/RUN/launches.jsonl      when the launcher started it, how that ended; see launches.py
SWEEP/RUN/job.lock            held by the processes of a job on this machine; see local_lock.py
SWEEP/RUN/log.txt             what it printed; all starts append
"""

import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_attnres.errors import InputError
from megatron_attnres.output_files import write_output_file
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.watching.run_folder import RunFolder

# As planning/names.py makes them: one word, one folder.
RUN_NAME = r"[A-Za-z0-9_][A-Za-z0-9._+=-]{0,199}"
FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    "size": str,
    "curve": str,
    "learning_rate": (int, float),
    "seed": int,
    "parameters": int,
    "non_embedding_parameters": int,
    "tokens": int,
    "train_iters": int,
    "flops": int,
    "flags": dict,
}
POSITIVE = ("learning_rate", "parameters", "tokens", "train_iters", "flops")
LARGEST = 10**40


@dataclass(frozen=True)
class SweepFolder:
    """The paths of one sweep."""

    path: Path

    @property
    def plan(self) -> Path:
        """The file with every run."""
        return self.path / "sweep.json"

    @property
    def launcher_lock(self) -> Path:
        """Held by the launcher."""
        return self.path / "launcher.lock"

    @property
    def lines(self) -> Path:
        """The runs for a Slurm array."""
        return self.path / "lines.txt"

    def slurm_log(self, job: str, index: int | str) -> Path:
        """What an element of a Slurm array printed."""
        return self.path / f"slurm-{job}_{index}.log"

    def run(self, name: str) -> RunFolder:
        """A run's folder."""
        return RunFolder(self.path / name)

    def flags(self, name: str) -> Path:
        """The flags that a run was started with."""
        return self.path / name / "flags.yaml"

    def launches(self, name: str) -> Path:
        """A run's starts by the launcher."""
        return self.path / name / "launches.jsonl"

    def job_lock(self, name: str) -> Path:
        """Held by a run's processes."""
        return self.path / name / "job.lock"

    def log(self, name: str) -> Path:
        """What a run printed."""
        return self.path / name / "log.txt"

    def write_plan(self, runs: Sequence[PlannedRun], dropped: Collection[str] = ()) -> None:
        """Write the plan, whole or not at all.

        Args:
            runs: all that were ever planned here.
            dropped: names of those that the newest grid does not have.

        Raises:
            InputError: it cannot be written.
        """
        content = {"runs": [asdict(run) for run in runs], "dropped": list(dropped)}
        self.write(self.plan, json.dumps(content, indent=1))

    def write(self, path: Path, text: str) -> None:
        """Write a file of the sweep beside its place and rename it, with its folder if need be.

        Raises:
            InputError: it cannot be written.
        """

        def replace(target: Path) -> None:
            writing = target.with_name(target.name + ".writing")
            writing.write_text(text, encoding="utf-8")
            os.replace(writing, target)

        write_output_file("--runs-dir", str(path), replace)

    def read_plan(self) -> list[PlannedRun]:
        """Every run of the plan.

        Raises:
            InputError: there is none, or it is no plan.
        """
        return self.read_plan_and_dropped()[0]

    def read_plan_and_dropped(self) -> tuple[list[PlannedRun], frozenset[str]]:
        """Every run of the plan, and the names of those that the newest grid does not have.

        Raises:
            InputError: as ``read_plan``.
        """
        try:
            if self.plan.exists() and not self.plan.is_file():
                raise ValueError("it is no file")
            content = json.loads(self.plan.read_text(encoding="utf-8"))
            runs = [PlannedRun(**run) for run in content["runs"]]
            _check_plan(runs)
            dropped = frozenset(content.get("dropped", ()))
        except OSError as error:
            raise InputError(
                f"{self.plan}: {error.strerror}; give a folder that launch_sweep.py run wrote to"
            ) from None
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise InputError(
                f"{self.plan}: not a sweep's plan ({error}); let launch_sweep.py run write it "
                "again, or give another folder"
            ) from None
        return runs, dropped


def _check_plan(runs: Sequence[PlannedRun]) -> None:
    """What was edited or damaged must not lead out of the folder, nor into arithmetic.

    Raises:
        ValueError: names run and field.
    """
    for run in runs:
        if not (isinstance(run.name, str) and re.fullmatch(RUN_NAME, run.name)):
            raise ValueError(f"{run.name!r} is no name of a run")
        for field, kinds in FIELD_TYPES.items():
            value = getattr(run, field)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise ValueError(f"run {run.name}: {field} is {str(value)[:40]!r}")
        for field in POSITIVE:
            if not 0 < getattr(run, field) < LARGEST:
                raise ValueError(f"run {run.name}: {field} is {str(getattr(run, field))[:40]}")
    if len({run.name for run in runs}) < len(runs):
        raise ValueError("two runs have one name")
