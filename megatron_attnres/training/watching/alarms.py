"""Losses and gradient norms that leave the course of the iterations before. No torch."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from megatron_attnres.training.watching.events import Kind

# Of a normal distribution, the standard deviation over the median absolute deviation.
_DEVIATION_PER_MAD = 1.4826
# A loss that hardly moves at all is not alarming because it moves a little: share of the median.
_SMALLEST_DEVIATION = 0.005
# Before so many iterations, or a full window if that is smaller, there is no course to leave.
_FEWEST = 10


@dataclass(frozen=True)
class AlarmConfig:
    """When to raise an alarm.

    Attributes:
        window: iterations that make the course.
        loss_deviations: standard deviations above the median loss; 0 for never.
        grad_norm_ratio: times the median gradient norm; 0 for never.
    """

    window: int
    loss_deviations: float
    grad_norm_ratio: float


@dataclass(frozen=True)
class Alarm:
    """What left its course."""

    kind: Kind
    message: str


class Alarms:
    """Remembers the last losses and norms. Values that are not finite are someone else's matter."""

    def __init__(self, config: AlarmConfig) -> None:
        self._config = config
        self._fewest = min(_FEWEST, config.window)
        self._losses: deque[float] = deque(maxlen=config.window)
        self._norms: deque[float] = deque(maxlen=config.window)

    def look(self, iteration: int, loss: float, grad_norm: float) -> list[Alarm]:
        """The alarms of one more iteration."""
        alarms = [*self._loss_spike(iteration, loss), *self._grad_norm(iteration, grad_norm)]
        if math.isfinite(loss):
            self._losses.append(loss)
        if math.isfinite(grad_norm):
            self._norms.append(grad_norm)
        return alarms

    def _loss_spike(self, iteration: int, loss: float) -> list[Alarm]:
        limit, usual = self._config.loss_deviations, self._losses
        if not limit or len(usual) < self._fewest or not math.isfinite(loss):
            return []
        middle = median(usual)
        spread = _DEVIATION_PER_MAD * median(abs(value - middle) for value in usual)
        deviation = max(spread, _SMALLEST_DEVIATION * abs(middle))
        if deviation == 0 or loss - middle <= limit * deviation:
            return []
        message = (
            f"iteration {iteration}: loss {loss:.4f} is {(loss - middle) / deviation:.1f} standard "
            f"deviations above {middle:.4f}, the median of {len(usual)} iterations"
        )
        return [Alarm("loss spike", message)]

    def _grad_norm(self, iteration: int, norm: float) -> list[Alarm]:
        limit, usual = self._config.grad_norm_ratio, self._norms
        if not limit or len(usual) < self._fewest or not math.isfinite(norm):
            return []
        middle = median(usual)
        if norm <= limit * middle:
            return []
        times = f"{norm / middle:.1f} times" if middle > 0 else "above"
        message = (
            f"iteration {iteration}: gradient norm {norm:.4g} is {times} {middle:.4g}, the median "
            f"of {len(usual)} iterations"
        )
        return [Alarm("gradient norm", message)]
