"""What an evaluation found, for programs: plain data and JSON. No torch."""

import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megatron_attnres.evaluation.comparison.settings import EvaluationSettings
from megatron_attnres.evaluation.perplexity.perplexity import Perplexity
from megatron_attnres.evaluation.tasks.harness import TaskFigure
from megatron_attnres.model.configuration import ModelConfig

_PACKAGES = ("megatron_attnres", "torch", "megatron-core", "lm_eval")


@dataclass(frozen=True)
class RunResult:
    """What was found out about one run.

    Attributes:
        run: as given to ``--load``.
        checkpoint: its folder.
        model: sizes and residual connections.
        iteration, trained_tokens: where its training stands.
        precision: that it was evaluated in.
        context, stride: of the windows, in tokens.
        perplexity: None if not asked for.
        tasks: empty if not asked for.
        positions: that the model computed, context included and padding left out.
        seconds: in which it did; reading, tokenising and the harness' own work left out.
    """

    run: str
    checkpoint: str
    model: ModelConfig
    iteration: int
    trained_tokens: int
    precision: str
    context: int
    stride: int
    perplexity: Perplexity | None
    tasks: list[TaskFigure]
    positions: int
    seconds: float

    @property
    def mode(self) -> str:
        """Residual connections: ``baseline``, ``block`` or ``full``."""
        return self.model.attn_res.mode

    @property
    def tokens_per_second(self) -> float | None:
        """Positions a second, over all ranks; None where nothing was computed."""
        return self.positions / self.seconds if self.seconds > 0 else None


def as_object(results: Sequence[RunResult], settings: EvaluationSettings) -> dict[str, Any]:
    """One JSON object; what is no finite number in it is null.

    Args:
        results: by run.
        settings: that they have in common.
    """
    shared = asdict(settings)
    job = shared.pop("job")
    return _plain(
        {
            "layout": job.pop("layout"),
            "settings": shared,
            "versions": {"python": platform.python_version(), **_versions()},
            "runs": [
                asdict(result)
                | {"mode": result.mode, "tokens_per_second": result.tokens_per_second}
                | {"perplexity": _with_figures(result.perplexity)}
                for result in results
            ],
        }
    )


def _with_figures(perplexity: Perplexity | None) -> dict[str, Any] | None:
    return None if perplexity is None else asdict(perplexity) | perplexity.figures


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # the harness, where no task was asked for
            continue
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str | None) else str(value)
