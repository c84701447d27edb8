"""Where the metrics of a run go: file, TensorBoard, Weights & Biases, progress bar."""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from torch import distributed
from tqdm import tqdm

from megatron_attnres.errors import InputError
from megatron_attnres.training.metrics import IterationMetrics
from megatron_attnres.training.run_config import RunConfig, WatchConfig

# Between two lines of a log file.
LINE_SECONDS = 10.0


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
            # Beside and renamed: whatever happens meanwhile, what was measured stays.
            writing = Path(path).with_name(Path(path).name + ".writing")
            writing.write_text("".join(_lines_up_to(Path(path), resumed_iteration)), "utf-8")
            os.replace(writing, path)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise InputError(
                f"--metrics-file {path}: {error.strerror}; give a writable file"
            ) from error

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


class WandbRun:
    """A run of Weights & Biases. A resumed run continues it.

    Raises:
        InputError: it does not begin: no key, no network, no space.
    """

    def __init__(self, watch: WatchConfig, configuration: dict[str, Any]) -> None:
        import wandb

        folder = Path(watch.run_dir).resolve()
        try:
            self._run = wandb.init(
                project=watch.wandb_project,
                name=watch.wandb_exp_name or folder.name,
                # The same for every start from this folder.
                id=sha256(str(folder).encode()).hexdigest()[:16],
                resume="allow",
                dir=folder,
                mode=watch.wandb_mode,
                config=configuration,
                settings=wandb.Settings(silent=True),
            )
        except (wandb.Error, OSError) as error:
            raise InputError(
                f"--wandb-project {watch.wandb_project}: {error}; --wandb-mode offline needs no "
                "key and no network"
            ) from error

    def write(self, metrics: IterationMetrics) -> None:
        """Log the iteration's scalars."""
        self._run.log(metrics.as_dict(), step=metrics.iteration)

    def close(self) -> None:
        """Write what is buffered; online, wait until it is sent."""
        self._run.finish()


class ProgressLines:
    """For log files: a line now and then, and one for the last iteration."""

    def __init__(self, train_iters: int) -> None:
        self._train_iters = train_iters
        self._due = 0.0

    def write(self, metrics: IterationMetrics) -> None:
        """Print a line if it is time."""
        now = time.monotonic()
        if now < self._due and metrics.iteration < self._train_iters:
            return
        self._due = now + LINE_SECONDS
        left = (self._train_iters - metrics.iteration) * metrics.step_seconds
        print(
            f"iteration {metrics.iteration}/{self._train_iters}: loss {metrics.lm_loss:.4f}, "
            f"{metrics.tokens_per_second:,.0f} tokens/s, {metrics.step_seconds:.2f} s, about "
            f"{left / 60:,.0f} min left",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """Nothing to close."""


class ProgressBar:
    """For a terminal: one bar with loss, speed and pipeline traffic."""

    def __init__(self, train_iters: int, start: int, interval: int) -> None:
        self._interval = interval
        self._bar = tqdm(
            total=train_iters,
            initial=start,
            unit="it",
            mininterval=0.5,
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
    """All sinks of one rank; the ranks that do not write have none.

    A sink that cannot be written, for a full disk say, is no reason to stop training: it is said
    once, and tried again at the next iteration.
    """

    def __init__(self, sinks: Sequence[MetricsSink]) -> None:
        self._sinks = sinks
        self._complained: set[MetricsSink] = set()

    def write(self, metrics: IterationMetrics) -> None:
        """Hand an iteration to every sink."""
        for sink in self._sinks:
            try:
                sink.write(metrics)
            except OSError as error:
                self._complain(sink, error)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:
                self._complain(sink, error)

    def _complain(self, sink: MetricsSink, error: OSError) -> None:
        if sink in self._complained:
            return
        self._complained.add(sink)
        with suppress(OSError):
            name = type(sink).__name__
            tqdm.write(f"{name}: not written: {error}; training goes on", file=sys.stderr)


def open_sinks(config: RunConfig, iteration: int, history: History) -> Sinks:
    """Where the run's metrics go. One rank writes them.

    Args:
        config: of the run.
        iteration: after which it goes on.
        history: keeps them in memory.

    Raises:
        InputError: a file cannot be written, or Weights & Biases not be reached.
    """
    if distributed.get_rank() != 0:
        return Sinks([])
    loop = config.loop
    sinks = [history]
    if loop.metrics_file is not None:
        sinks.append(JsonLinesFile(loop.metrics_file, iteration))
    if loop.tensorboard_dir is not None:
        sinks.append(TensorBoardFile(loop.tensorboard_dir, iteration))
    if config.watch.wandb_project is not None:
        sinks.append(WandbRun(config.watch, asdict(config)))
    # Last, so that the bar is not drawn when a file cannot be opened.
    if sys.stderr.isatty():
        sinks.append(ProgressBar(loop.train_iters, iteration, loop.log_interval))
    else:
        sinks.append(ProgressLines(loop.train_iters))
    return Sinks(sinks)


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
