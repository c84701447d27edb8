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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_attnres.errors import InputError
from megatron_attnres.output_files import write_output_file
from megatron_attnres.training.sweeps.planned_run import PlannedRun
from megatron_attnres.training.watching.run_folder import RunFolder


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

    def write_plan(self, runs: Sequence[PlannedRun]) -> None:
        """Write the plan, whole or not at all.

        Raises:
            InputError: it cannot be written.
        """
        text = json.dumps({"runs": [asdict(run) for run in runs]}, indent=1)
        self.write(self.plan, text)

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
        try:
            content = json.loads(self.plan.read_text(encoding="utf-8"))
            return [PlannedRun(**run) for run in content["runs"]]
        except OSError as error:
            raise InputError(
                f"{self.plan}: {error.strerror}; give a folder that launch_sweep.py run wrote to"
            ) from None
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{self.plan}: not a sweep's plan ({error})") from None
