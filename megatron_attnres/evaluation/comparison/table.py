"""Runs side by side: one column each, one row per figure. Pure, no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_attnres.evaluation.comparison.results import RunResult
from megatron_attnres.evaluation.tasks.harness import TaskFigure

# Up to where four decimals, and up to where whole numbers, can be read at a glance.
_MOST_WITH_DECIMALS, _MOST_WHOLE = 1e4, 1e9


@dataclass(frozen=True)
class _Row:
    name: str
    cells: tuple[str, ...]


def comparison_table(results: Sequence[RunResult], corpus: str | None, markdown: bool) -> str:
    """The results of runs.

    Args:
        results: by run.
        corpus: what the perplexity is of; None if it was not asked for.
        markdown: as a Markdown table, else in columns.
    """
    rows = [*_run_rows(results), *_perplexity_rows(results), *_task_rows(results)]
    rows += [_row("tokens per second", results, lambda run: _rate(run.tokens_per_second))]
    header = _Row("", tuple(_names(results)))
    table = (_markdown if markdown else _columns)(header, rows)
    return table if corpus is None else f"perplexity of {corpus}\n\n{table}"


def _run_rows(results: Sequence[RunResult]) -> Iterator[_Row]:
    yield _row("iteration", results, lambda run: f"{run.iteration:,}")
    yield _row("trained on tokens", results, lambda run: f"{run.trained_tokens:,}")
    yield _row("precision", results, lambda run: run.precision)
    yield _row("context", results, lambda run: f"{run.context:,}")


def _perplexity_rows(results: Sequence[RunResult]) -> Iterator[_Row]:
    if results[0].perplexity is None:
        return
    yield _row("stride", results, lambda run: f"{run.stride:,}")
    for name in ("documents", "tokens", "words", "bytes"):
        yield _row(name, results, lambda run, name=name: f"{getattr(run.perplexity, name):,}")
    for name in results[0].perplexity.figures:
        yield _row(
            name.replace("_", " "),
            results,
            lambda run, name=name: _number(run.perplexity.figures[name]),
        )


def _task_rows(results: Sequence[RunResult]) -> Iterator[_Row]:
    """The tasks are the same for all runs, and so are their figures' names."""
    for index, figure in enumerate(results[0].tasks):
        yield _row(_task_name(figure), results, lambda run, index=index: _figure(run.tasks[index]))


def _row(name: str, results: Sequence[RunResult], cell: Callable[[RunResult], str]) -> _Row:
    return _Row(name, tuple(cell(run) for run in results))


def _names(results: Sequence[RunResult]) -> Iterator[str]:
    """The run's folder, or the path as given where two folders have one name; and its mode."""
    folders = [Path(run.run).resolve().name for run in results]
    for run, folder in zip(results, folders, strict=True):
        name = folder if folders.count(folder) == 1 else run.run
        yield f"{name} ({run.mode})"


def _task_name(figure: TaskFigure) -> str:
    chosen = "" if figure.filter == "none" else f", {figure.filter}"
    shots = f", {figure.num_fewshot}-shot" if figure.num_fewshot else ""
    documents = f", {figure.documents:,} documents" if figure.documents is not None else ""
    return f"{figure.task} {figure.metric}{chosen}{shots}{documents}"


def _figure(figure: TaskFigure) -> str:
    value = _number(figure.value)
    return value if figure.stderr is None else f"{value} ± {_number(figure.stderr)}"


def _number(value: float) -> str:
    if abs(value) < _MOST_WITH_DECIMALS:
        return f"{value:,.4f}"
    return f"{value:,.0f}" if abs(value) < _MOST_WHOLE else f"{value:.4e}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _columns(header: _Row, rows: Sequence[_Row]) -> str:
    everything = [header, *rows]
    first = max(len(row.name) for row in everything)
    widths = [max(map(len, column)) for column in zip(*(r.cells for r in everything), strict=True)]
    return "\n".join(
        "  ".join(
            [
                f"{row.name:<{first}}",
                *(f"{cell:>{width}}" for cell, width in zip(row.cells, widths, strict=True)),
            ]
        )
        for row in everything
    )


def _markdown(header: _Row, rows: Sequence[_Row]) -> str:
    rule = _Row("---", ("---:",) * len(header.cells))
    return "\n".join(
        f"| {' | '.join(_escaped(cell) for cell in (row.name, *row.cells))} |"
        for row in (header, rule, *rows)
    )


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
