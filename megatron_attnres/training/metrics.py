"""What an iteration is measured by, and the files it is written to."""

import json
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from tqdm import tqdm

from megatron_attnres.errors import InputError
from megatron_attnres.parallel.cpu import device
from megatron_attnres.parallel.groups import ParallelGroups
from megatron_attnres.pipeline.wire import Traffic


@dataclass(frozen=True)
class IterationMetrics:
    """One object of the metrics file.

    Attributes:
        iteration: from 1.
        lm_loss: mean over the global batch before the update, nats per token.
        grad_norm: of all parameters before clipping.
        learning_rate: that the update used.
        tokens: trained on since the run's first iteration, this one included.
        step_seconds: wall time of the iteration without validation and saving.
        tokens_per_second: of the iteration, over all ranks.
        p2p_bytes_forward, p2p_bytes_backward: payload that all ranks sent over pipeline hops.
        peak_memory_bytes: of the rank that used most, since start.
        peak_cached_sources: most block summaries that a rank's cache held at once; an entry each.
        update_skipped: the gradient was not finite, weights are unchanged.
        save_pause_seconds: that training stood still for a save, where one was begun.
        validation_loss: nats per token, where validation ran after the iteration.
    """

    iteration: int
    lm_loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    step_seconds: float
    tokens_per_second: float
    p2p_bytes_forward: int
    p2p_bytes_backward: int
    peak_memory_bytes: int
    peak_cached_sources: int
    update_skipped: bool
    validation_loss: float | None = None
    save_pause_seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """By name, without what the iteration does not have."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def mean_loss_of_batch(losses: Sequence[dict[str, Tensor]], groups: ParallelGroups) -> float:
    """Mean of the micro-batches' losses over the global batch, on every rank. Collective.

    The sum runs over the micro-batches in order, then over data-parallel ranks, then adds the
    zeros of the stages that have none: so it is the same number, to the last bit, for every
    pipeline layout.
    """
    total = torch.zeros((), dtype=torch.float64, device=device())
    for loss in losses:
        total += loss["lm_loss"].to(torch.float64) / len(losses)
    distributed.all_reduce(total, group=groups.collection.dp)
    distributed.all_reduce(total, group=groups.collection.pp)
    return total.item() / groups.layout.data


def bytes_of_all_ranks(traffic: Traffic) -> tuple[int, int]:
    """Forward and backward payload bytes that all ranks of the job sent. Collective."""
    sent = torch.tensor(
        [traffic.total("forward"), traffic.total("backward")], dtype=torch.int64, device=device()
    )
    distributed.all_reduce(sent)
    return tuple(sent.tolist())


def largest_of_all_ranks(*values: int) -> tuple[int, ...]:
    """Each value of the rank on which it is largest. Collective."""
    largest = torch.tensor(values, dtype=torch.int64, device=device())
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    return tuple(largest.tolist())


def peak_memory() -> int:
    """This rank's peak memory in bytes: CUDA's allocator, else the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux KiB.
    return peak if sys.platform == "darwin" else peak * 1024


class MetricsSink(Protocol):
    """Somewhere metrics go."""

    def write(self, metrics: IterationMetrics) -> None:
        """Take one iteration."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


class History:
    """The iterations of this process, in memory, as the metrics file holds them."""

    def __init__(self) -> None:
        self.iterations: list[dict[str, Any]] = []

    def write(self, metrics: IterationMetrics) -> None:
        """Keep one iteration."""
        self.iterations.append(metrics.as_dict())

    def close(self) -> None:
        """Nothing to close."""


class JsonLinesFile:
    """The metrics file. A resumed run continues it after the iteration that it resumes from.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, path: str, resumed_iteration: int) -> None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            kept = _lines_up_to(Path(path), resumed_iteration)
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise InputError(
                f"--metrics-file {path}: {error.strerror}; give a writable file"
            ) from error
        self._file.writelines(kept)

    def write(self, metrics: IterationMetrics) -> None:
        """Append one line at once, so that a reader and a crash see whole iterations."""
        # json writes the shortest text that reads back as the same float.
        self._file.write(json.dumps(metrics.as_dict()) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardFile:
    """TensorBoard event files, one scalar per metric."""

    def __init__(self, folder: str, resumed_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=resumed_iteration + 1)

    def write(self, metrics: IterationMetrics) -> None:
        """Add the iteration's scalars."""
        for name, value in metrics.as_dict().items():
            if name != "iteration":
                self._writer.add_scalar(name, value, metrics.iteration)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class ProgressBar:
    """One bar with loss, speed and pipeline traffic."""

    def __init__(self, train_iters: int, start: int, interval: int) -> None:
        self._interval = interval
        self._bar = tqdm(
            total=train_iters,
            initial=start,
            unit="it",
            # A log file gets a line now and then, a terminal a living bar.
            mininterval=0.5 if sys.stderr.isatty() else 10.0,
            disable="PYTEST_CURRENT_TEST" in os.environ,
        )

    def write(self, metrics: IterationMetrics) -> None:
        """Move on by one iteration."""
        p2p = metrics.p2p_bytes_forward + metrics.p2p_bytes_backward
        if metrics.iteration % self._interval == 0:
            shown = {
                "loss": f"{metrics.lm_loss:.3f}",
                "tokens/s": f"{metrics.tokens_per_second:,.0f}",
                "p2p": f"{p2p / 2**20:.1f} MiB/it",
            }
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Leave the finished bar on screen."""
        self._bar.close()


class Sinks:
    """All sinks of one rank; the ranks that do not write have none."""

    def __init__(self, sinks: Sequence[MetricsSink]) -> None:
        self._sinks = sinks

    def write(self, metrics: IterationMetrics) -> None:
        """Hand an iteration to every sink."""
        for sink in self._sinks:
            sink.write(metrics)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a metrics file."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _lines_up_to(path: Path, iteration: int) -> list[str]:
    """The whole lines of iterations that a resumed run will not do again."""
    if iteration == 0 or not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["iteration"] > iteration:
                break
        except (ValueError, TypeError, KeyError):
            # The line at which an interrupted run was stopped; what follows is done again.
            break
        kept.append(line)
    return kept
