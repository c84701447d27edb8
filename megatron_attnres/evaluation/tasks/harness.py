"""Figures of tasks, computed by lm-evaluation-harness from a model's answers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.tasks.harness_tasks import LoadedTasks
from megatron_attnres.evaluation.tasks.quiet import quiet

# Resamples for the standard error of a figure that is no mean, such as lambada's perplexity; the
# harness' command takes 100 times as many, in processes of its own.
_BOOTSTRAP_ITERATIONS = 1000


@dataclass(frozen=True)
class TaskFigure:
    """One figure of a task.

    Attributes:
        task: or group, by the harness' name.
        metric: such as ``acc_norm``.
        filter: of the answers, ``none`` for most tasks.
        value: of the metric.
        stderr: standard error; None where the harness gives none.
        higher_is_better: None if the harness does not say.
        documents: that it is of; None for a group.
        num_fewshot: examples in front of each; None where tasks of a group differ.
        version: of the task's definition.
    """

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    higher_is_better: bool | None
    documents: int | None
    num_fewshot: int | None
    version: Any


def evaluate_tasks(tasks: LoadedTasks, model: Any) -> list[TaskFigure]:
    """Let the harness ask the model and compute its figures.

    Args:
        tasks: loaded; they can be asked of several models in turn.
        model: a HarnessModel.

    Raises:
        InputError: the model is so bad that a figure is no number, or a document is not what its
            task takes it for.
    """
    from lm_eval.evaluator import evaluate

    with quiet(), _bootstrap_in_this_process():
        try:
            results = evaluate(
                model,
                {"tasks": tasks.tasks, "groups": tasks.groups},
                limit=tasks.request.limit,
                bootstrap_iters=_BOOTSTRAP_ITERATIONS,
                log_samples=False,
            )
        except OverflowError as error:
            raise InputError(
                f"--tasks {','.join(tasks.request.names)}: a perplexity is beyond what the harness "
                "can compute; the model's training may have diverged"
            ) from error
        except Exception as error:  # documents are met one by one, and raise whatever they raise
            if error is model.error:
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise InputError(
                f"--tasks {','.join(tasks.request.names)}: the harness cannot evaluate a document "
                f"({reason}); give documents and definitions that fit"
            ) from error
    return [figure for task in results["results"] for figure in _figures(task, results)]


def _figures(task: str, results: Any) -> Iterator[TaskFigure]:
    values = results["results"][task]
    better = results["higher_is_better"].get(task, {})
    samples = results["n-samples"].get(task, {})
    for key, value in values.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, Real):
            continue
        stderr = values.get(f"{metric}_stderr,{chosen}")
        yield TaskFigure(
            task,
            metric,
            chosen,
            float(value),
            float(stderr) if isinstance(stderr, Real) else None,
            better.get(metric),
            samples.get("effective"),
            results["n-shot"].get(task),
            results["versions"].get(task),
        )


@contextmanager
def _bootstrap_in_this_process() -> Iterator[None]:
    """Processes forked from a rank would share its sockets to the others."""
    name = "DISABLE_MULTIPROC"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
