"""The files that a study is written to. No torch."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_attnres.analysis.scaling_laws.figure import draw_study
from megatron_attnres.analysis.scaling_laws.fits.study import Study
from megatron_attnres.analysis.scaling_laws.measurements.csv_points import csv_text
from megatron_attnres.analysis.scaling_laws.report import markdown_text, study_json
from megatron_attnres.output_files import write_output_file


def write_study(folder: Path, study: Study, cautions: Sequence[str]) -> list[Path]:
    """Write picture, JSON, Markdown and the points.

    Returns:
        The files.

    Raises:
        InputError: one cannot be written.
    """
    as_json = json.dumps(study_json(study, cautions), indent=1)
    writers: dict[str, Callable[[Path], object]] = {
        "scaling_law.png": lambda path: draw_study(study, path),
        "scaling_law.json": lambda path: path.write_text(as_json + "\n", encoding="utf-8"),
        "scaling_law.md": lambda path: path.write_text(
            markdown_text(study, cautions), encoding="utf-8"
        ),
        "points.csv": lambda path: path.write_text(
            csv_text(study.measurements.points), encoding="utf-8"
        ),
    }
    for name, write in writers.items():
        write_output_file("--output", str(folder / name), write)
    return [folder / name for name in writers]
