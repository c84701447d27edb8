"""The files of a profile: timelines for programs, a trace and a picture to look at, a report."""

import json
from pathlib import Path

from megatron_attnres.pipeline.timeline.chrome_trace import chrome_trace
from megatron_attnres.pipeline.timeline.picture import draw_timeline
from megatron_attnres.pipeline.timeline.records import Timelines
from megatron_attnres.pipeline.timeline.report import report_table
from megatron_attnres.pipeline.timeline.timeline_file import write_timelines

TIMELINES, TRACE, REPORT, PICTURE = "timelines.json", "trace.json", "report.txt", "timeline.png"


def write_outputs(folder: Path, timelines: Timelines) -> None:
    """Write all four files; the picture shows the last step of the first pipeline.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_timelines(folder / TIMELINES, timelines)
    (folder / TRACE).write_text(json.dumps(chrome_trace(timelines)), encoding="utf-8")
    (folder / REPORT).write_text(report_table(timelines) + "\n", encoding="utf-8")
    last = max(timelines.steps, key=lambda step: (step.iteration, -step.ranks[0]))
    draw_timeline(last, timelines.layout.pipeline_size, folder / PICTURE)
