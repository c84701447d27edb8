"""A study in words and numbers: text, Markdown, JSON. Pure."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_attnres.analysis.scaling_laws.fits.intervals import Interval
from megatron_attnres.analysis.scaling_laws.fits.study import Comparison, Study, SureFit
from megatron_attnres.text_table import table_lines

Row = tuple[str, ...]
FIT_HEADER = ("curve", "form", "A", "alpha", "E", "noise")
POINT_HEADER = ("curve", "size", "PFLOP/s-days", "runs", "loss", "residuals")
ADVANTAGE_HEADER = (
    "curve",
    "over",
    "form",
    "at PFLOP/s-days",
    "advantage",
    "measured range",
    "on average",
    "least to greatest",
)
EXPLANATION = (
    "L = A C^-alpha (power) or L = E + A C^-alpha (offset), C in PFLOP/s-days, L in nats per "
    "token. In brackets: 95 % intervals. Noise and residuals: of log L, about shares of the loss."
)


def report_lines(study: Study, cautions: Sequence[str]) -> Iterator[str]:
    """For a terminal."""
    for title, rows in _tables(study):
        yield title
        yield from (f"  {line}" for line in table_lines(rows, len(rows[0])))
        yield ""
    for title, lines in _lists(study, cautions):
        yield title
        yield from (f"  {line}" for line in lines)
    if not cautions:
        yield "warnings: none"


def markdown_text(study: Study, cautions: Sequence[str]) -> str:
    """As a page."""
    parts = ["# Scaling laws", "", EXPLANATION, ""]
    for title, rows in _tables(study):
        parts += [f"## {title[0].upper()}{title[1:]}", "", *_markdown_rows(rows), ""]
    for title, lines in _lists(study, cautions):
        parts += [f"## {title[0].upper()}{title[1:]}", "", *(f"- {line}" for line in lines), ""]
    return "\n".join(parts)


def study_json(study: Study, cautions: Sequence[str]) -> dict[str, Any]:
    """Everything, for programs; an end that the data do not bound is null."""
    measurements = study.measurements
    return {
        "curves": [_curve_json(sure) for sure in study.fits],
        "advantages": [_comparison_json(one) for one in study.comparisons],
        "points": [
            {
                "curve": point.curve,
                "size": point.size,
                "seed": point.seed,
                "flops": point.flops,
                "loss": point.loss,
                "run": point.run,
            }
            for point in measurements.points
        ],
        "learning_rates": [
            {
                "curve": one.curve,
                "size": one.size,
                "learning_rate": one.learning_rate,
                "tried": list(one.tried),
            }
            for one in measurements.choices
        ],
        "warnings": list(cautions),
        "excluded": list(measurements.excluded),
        "worse_learning_rates": list(measurements.worse),
    }


def number_text(value: float) -> str:
    """Four digits, and as a power of ten where that is shorter."""
    if math.isinf(value):
        return "no bound"
    return f"{value:.4g}"


def factor_text(value: float) -> str:
    """A compute advantage: ``1.25x``."""
    return "infinite" if math.isinf(value) else f"{value:.2f}x" if value < 100 else f"{value:.3g}x"


def range_text(interval: Interval) -> str:
    """Of a factor: ``1.10 to 1.42``."""
    low, high = (
        "no bound" if math.isinf(end) or end == 0 else f"{end:.2f}" if end < 100 else f"{end:.3g}"
        for end in (interval.low, interval.high)
    )
    return f"{low} to {high}"


def _tables(study: Study) -> Iterator[tuple[str, list[Row]]]:
    yield "fits", [FIT_HEADER, *map(_fit_row, study.fits)]
    if study.comparisons:
        rows = [ADVANTAGE_HEADER, *map(_comparison_row, study.comparisons)]
        yield "compute advantages", rows
    yield "points", [POINT_HEADER, *_point_rows(study)]


def _lists(study: Study, cautions: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    measurements = study.measurements
    choices = [
        f"{one.curve}, {one.size}: {one.learning_rate:g} of {', '.join(map(str, one.tried))}"
        for one in measurements.choices
    ]
    found = (
        ("best learning rates", choices),
        ("left out, not the best learning rate", list(measurements.worse)),
        ("left out", list(measurements.excluded)),
        ("warnings", list(cautions)),
    )
    yield from ((title, lines) for title, lines in found if lines)


def _fit_row(sure: SureFit) -> Row:
    law = sure.fit.law
    cells = [sure.fit.curve.name, str(sure.fit.form)]
    for name in ("coefficient", "exponent", "offset"):
        interval = sure.intervals.get(name)
        cells.append("-" if interval is None else _sure_text(getattr(law, name), interval))
    degrees = len(sure.fit.curve.means) - len(sure.fit.form.constants)
    return (*cells, f"{sure.fit.scale:.2%}" if degrees else "-")


def _sure_text(value: float, interval: Interval) -> str:
    return f"{number_text(value)} ({number_text(interval.low)} to {number_text(interval.high)})"


def _comparison_row(one: Comparison) -> Row:
    cells = (
        one.other.curve.name,
        one.reference.curve.name,
        str(one.form),
        number_text(one.compute),
        f"{factor_text(one.at.factor)} ({range_text(one.at.interval)})",
    )
    over = one.over_range
    if over is None:
        return (*cells, "none", "-", "-")
    return (
        *cells,
        f"{number_text(over.low)} to {number_text(over.high)}",
        f"{factor_text(over.mean.factor)} ({range_text(over.mean.interval)})",
        f"{factor_text(over.least)} to {factor_text(over.greatest)}",
    )


def _point_rows(study: Study) -> Iterator[Row]:
    for curve in study.curves:
        fits = [sure.fit for sure in study.fits if sure.fit.curve is curve]
        for index, mean in enumerate(curve.means):
            residuals = [f"{fit.form} {fit.residuals[index]:+.2%}" for fit in fits]
            yield (
                curve.name,
                mean.size,
                number_text(mean.compute),
                str(mean.runs),
                f"{mean.loss:.4f}",
                ", ".join(residuals),
            )


def _curve_json(sure: SureFit) -> dict[str, Any]:
    fit = sure.fit
    constants = {"A": "coefficient", "alpha": "exponent", "E": "offset"}
    return {
        "curve": fit.curve.name,
        "form": str(fit.form),
        "coefficients": {letter: getattr(fit.law, name) for letter, name in constants.items()},
        "intervals": {
            letter: _interval_json(sure.intervals[name])
            for letter, name in constants.items()
            if name in sure.intervals
        },
        "noise": fit.scale if len(fit.curve.means) > len(fit.form.constants) else None,
        "sizes": [
            {
                "size": mean.size,
                "pflop_s_days": mean.compute,
                "loss": mean.loss,
                "runs": mean.runs,
                "residual": residual,
            }
            for mean, residual in zip(fit.curve.means, fit.residuals, strict=True)
        ],
        "seed_spread": fit.curve.seed_spread,
    }


def _comparison_json(one: Comparison) -> dict[str, Any]:
    over = one.over_range
    return {
        "curve": one.other.curve.name,
        "over": one.reference.curve.name,
        "form": str(one.form),
        "at": {
            "pflop_s_days": one.compute,
            "factor": _finite(one.at.factor),
            "interval": _interval_json(one.at.interval),
        },
        "range": None
        if over is None
        else {
            "pflop_s_days": [over.low, over.high],
            "factor": _finite(over.mean.factor),
            "interval": _interval_json(over.mean.interval),
            "least": _finite(over.least),
            "greatest": _finite(over.greatest),
        },
    }


def _interval_json(interval: Interval) -> list[float | None]:
    return [_finite(interval.low), _finite(interval.high)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _markdown_rows(rows: Sequence[Row]) -> Iterator[str]:
    for index, row in enumerate(rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
        if index == 0:
            yield f"| {' | '.join('---' for _ in row)} |"
