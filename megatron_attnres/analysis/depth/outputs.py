"""The files of a measurement: numbers for programs, pictures and a report to look at. No torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_attnres.analysis.depth.described import (
    Subject,
    measurement_json,
    token_weights_json,
)
from megatron_attnres.analysis.depth.picture import (
    draw_magnitudes,
    draw_token_weights,
    draw_weights,
)
from megatron_attnres.analysis.depth.records import Measurement, TokenWeights
from megatron_attnres.analysis.depth.report import report_page
from megatron_attnres.data.files import written_at_once
from megatron_attnres.errors import InputError

NUMBERS, PICTURE = "depth_weights.json", "depth_weights.png"
TOKEN_NUMBERS, TOKEN_PICTURE = "token_weights.json", "token_weights.png"
MAGNITUDES, REPORT = "magnitudes.png", "report.html"

Write = Callable[[Path], None]


def write_outputs(
    folder: Path,
    subject: Subject,
    measurement: Measurement,
    tokens: TokenWeights | None,
    texts: list[str],
) -> list[Path]:
    """Write all files, each whole or not at all; of a baseline those of its magnitudes.

    Args:
        folder: made if it is missing.
        subject: what was measured.
        measurement: means over the text.
        tokens: weights of the tokens that are shown one by one; None for a baseline.
        texts: of these tokens.

    Returns:
        The files.

    Raises:
        InputError: the folder cannot be written.
    """
    title = f"{subject.title}: {subject.about}"
    magnitudes, weights = measurement.magnitudes, measurement.weights
    writers: dict[str, Write] = {
        NUMBERS: lambda path: _write_json(path, measurement_json(subject, measurement)),
        MAGNITUDES: lambda path: draw_magnitudes(magnitudes, title, path),
    }
    if weights is not None and tokens is not None:
        page = report_page(subject.title, subject.about, weights, tokens, texts, magnitudes)
        writers |= {
            PICTURE: lambda path: draw_weights(weights, title, path),
            TOKEN_NUMBERS: lambda path: _write_json(
                path, token_weights_json(subject, tokens, texts)
            ),
            TOKEN_PICTURE: lambda path: draw_token_weights(tokens, texts, subject.title, path),
            REPORT: lambda path: path.write_text(page, encoding="utf-8"),
        }
    try:
        for name, write in writers.items():
            with written_at_once(folder / name) as path:
                write(path)
    except OSError as error:
        raise InputError(f"--output {folder}: {error.strerror}; give a writable folder") from None
    return [folder / name for name in writers]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
