"""What a finished run leaves: a summary in JSON, a loss curve, a few lines on screen."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed

from megatron_attnres.data.batches import batches
from megatron_attnres.data.statistics import label_counts, training_token_counts, unigram_entropy
from megatron_attnres.optimizer.training_optimizer import TrainingOptimizer
from megatron_attnres.parallel.cpu import device
from megatron_attnres.training.batches import BatchSource
from megatron_attnres.training.metrics import read_metrics
from megatron_attnres.training.run_config import RunConfig
from megatron_attnres.training.sinks import History


def report(
    config: RunConfig, optimizer: TrainingOptimizer, data: BatchSource, history: History
) -> None:
    """Print the summary; write it to ``--summary-file`` with the loss curve beside. Collective."""
    fraction = _largest(optimizer.optimizer_state_fraction())
    if distributed.get_rank() != 0:
        return
    loop = config.loop
    # The file also holds what a resumed run did before.
    metrics = read_metrics(loop.metrics_file) if loop.metrics_file else history.iterations
    if not metrics:
        print(f"nothing left to do: iteration {loop.train_iters} was reached before")
        return
    summary = summarize(config, metrics, fraction)
    if loop.summary_file is not None:
        if data.validation is not None:
            summary["unigram_entropy"] = entropy_of_validation(config, data)
        _write(Path(loop.summary_file), summary, metrics)
    _print(summary)
    if loop.summary_file is not None:
        print(f"written           {loop.summary_file} and the loss curve beside it")


def summarize(
    config: RunConfig, metrics: list[dict[str, Any]], state_fraction: float
) -> dict[str, Any]:
    """The run in a few numbers.

    Args:
        config: of the run.
        metrics: objects of the metrics file.
        state_fraction: the largest share of the optimizer state that a rank holds.
    """
    last = metrics[-1]
    return {
        "validation_loss": last.get("validation_loss"),
        "lm_loss": last["lm_loss"],
        "iterations": last["iteration"],
        "tokens": last["tokens"],
        # The first iterations warm caches up; the median is not moved by them.
        "tokens_per_second": median(line["tokens_per_second"] for line in metrics),
        "step_seconds": median(line["step_seconds"] for line in metrics),
        "p2p_bytes_per_step": last["p2p_bytes_forward"] + last["p2p_bytes_backward"],
        "optimizer_state_fraction_per_rank": state_fraction,
        "peak_memory_bytes": max(line["peak_memory_bytes"] for line in metrics),
        "layout": {**asdict(config.layout), "zero_stage": config.optimizer.zero_stage},
        "model": asdict(config.model),
    }


def entropy_of_validation(config: RunConfig, data: BatchSource) -> float:
    """Nats per token of the validation tokens under the training split's token frequencies."""
    vocab_size = config.model.vocab_size
    evaluated = sum(
        label_counts(batch["labels"], batch["loss_mask"], vocab_size)
        for batch in batches(data.validation, 0, config.loop.global_batch_size, 0, 1)
    )
    return unigram_entropy(training_token_counts(config.data, vocab_size), evaluated)


def draw_loss_curve(metrics: list[dict[str, Any]], unigram: float | None, path: Path) -> None:
    """Training and validation loss over tokens, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    validated = [line for line in metrics if "validation_loss" in line]
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(_column(metrics, "tokens"), _column(metrics, "lm_loss"), lw=0.8, label="training")
    axes.plot(
        _column(validated, "tokens"),
        _column(validated, "validation_loss"),
        marker="o",
        label="validation",
    )
    if unigram is not None:
        axes.axhline(unigram, ls=":", color="grey", label="unigram entropy")
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _write(path: Path, summary: dict[str, Any], metrics: list[dict[str, Any]]) -> None:
    write_json(path, summary)
    draw_loss_curve(metrics, summary.get("unigram_entropy"), path.with_name("loss.png"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write beside and rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = path.with_name(path.name + ".writing")
    writing.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(writing, path)


def _column(metrics: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in metrics]


def _largest(value: float) -> float:
    largest = torch.tensor(value, dtype=torch.float64, device=device())
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    return largest.item()


def _print(summary: dict[str, Any]) -> None:
    layout, loss = summary["layout"], summary["validation_loss"]
    lines = [
        f"layout            TP {layout['tensor']}, P {layout['pipeline']}, "
        f"V {layout['virtual_pipeline']}, DP {layout['data']}, ZeRO-{layout['zero_stage']}",
        f"tokens            {summary['tokens']:,} at {summary['tokens_per_second']:,.0f} a second",
        f"p2p per iteration {summary['p2p_bytes_per_step']:,} bytes",
        f"optimizer state   {summary['optimizer_state_fraction_per_rank']:.3f} of it per rank",
        f"training loss     {summary['lm_loss']:.4f} nats per token",
    ]
    if loss is not None:
        lines.append(f"validation loss   {loss:.4f} nats per token")
    if "unigram_entropy" in summary:
        unigram = summary["unigram_entropy"]
        lines[-1] += f", {loss / unigram:.3f} of the unigram entropy {unigram:.4f}"
    print("\n".join(lines))
