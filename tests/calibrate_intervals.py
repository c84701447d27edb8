"""How often the 95 % intervals of scaling laws hold the truth, over many seeded trials. No pytest.

python tests/calibrate_intervals.py --trials 200
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.analysis.scaling_laws.fits.advantage import (
    advantage_of,
    factor_over,
    spread_over,
)
from megatron_attnres.analysis.scaling_laws.fits.fitting import fit_curve
from megatron_attnres.analysis.scaling_laws.fits.intervals import Interval, constant_intervals
from megatron_attnres.analysis.scaling_laws.fits.power_law import (
    Form,
    PowerLaw,
)
from megatron_attnres.analysis.scaling_laws.measurements.points import Curve, Point, curves_of
from megatron_attnres.training.sweeps.planning.budgets import FLOPS_PER_PFLOPS_DAY

PAPER = (PowerLaw(1.891, 0.057), PowerLaw(1.870, 0.058))
BENT = (PowerLaw(0.9, 0.16, 1.0), PowerLaw(0.87, 0.165, 1.0))


@dataclass(frozen=True)
class Design:
    """What is measured.

    Attributes:
        sizes: how many.
        seeds: of each size.
        smallest: compute of the smallest size, PFLOP/s-days.
        span: the largest size's compute in those of the smallest.
        form: of the truth and of the fit.
        shared: part of the noise's variance that a size's runs of both curves share.
        per_size: part of the noise's variance that all seeds of a size share.
        noise: standard deviation of log L.
        heavy: noise of Student's t with four degrees of freedom.
    """

    sizes: int
    seeds: int
    smallest: float
    span: float
    form: Form
    shared: float = 0.0
    per_size: float = 0.0
    noise: float = 0.01
    heavy: bool = False

    @property
    def laws(self) -> tuple[PowerLaw, PowerLaw]:
        """Reference and other."""
        return PAPER if self.form is Form.POWER else BENT

    @property
    def computes(self) -> list[float]:
        """PFLOP/s-days of the sizes."""
        return [
            float(one) for one in np.geomspace(self.smallest, self.smallest * self.span, self.sizes)
        ]

    def __str__(self) -> str:
        parts = [
            f"{self.form:<6} {self.sizes} sizes x {self.seeds}, {self.smallest:g} to x{self.span:g}"
        ]
        parts += [f"shared {self.shared:g}"] if self.shared else []
        parts += [f"per size {self.per_size:g}"] if self.per_size else []
        parts += ["heavy tails"] if self.heavy else []
        return ", ".join(parts)


DESIGNS = (
    Design(5, 1, 0.5, 40, Form.POWER),
    Design(5, 1, 1e-8, 50, Form.POWER),
    Design(5, 1, 0.5, 1000, Form.POWER, shared=0.8),
    Design(5, 2, 0.5, 40, Form.POWER),
    Design(5, 2, 0.5, 40, Form.POWER, per_size=0.7),
    Design(8, 1, 0.5, 40, Form.POWER, shared=0.5),
    Design(4, 1, 0.5, 40, Form.POWER),
    Design(5, 1, 0.5, 40, Form.POWER, heavy=True),
    Design(5, 1, 0.5, 40, Form.OFFSET),
    Design(5, 1, 0.01, 1000, Form.OFFSET, shared=0.8),
    Design(5, 2, 0.01, 1000, Form.OFFSET),
    Design(8, 1, 0.5, 40, Form.OFFSET),
    Design(8, 1, 0.01, 1000, Form.OFFSET),
    Design(8, 2, 1e-3, 1e5, Form.OFFSET, noise=0.003),
)


def noisy_curves(design: Design, seed: int) -> list[Curve]:
    """One trial's measurements of both curves."""
    generator = np.random.default_rng((seed, 1))
    shape = (2, design.sizes, design.seeds)
    draw = generator.standard_normal
    if design.heavy:
        draw = lambda shape: generator.standard_t(4, shape) / math.sqrt(2)  # noqa: E731
    own = 1 - design.shared - design.per_size
    noise = (
        math.sqrt(own) * draw(shape)
        + math.sqrt(design.shared) * draw((1, *shape[1:]))
        + math.sqrt(design.per_size) * draw((*shape[:2], 1))
    ) * design.noise
    points = [
        Point(
            name,
            f"s{size}",
            run,
            compute * FLOPS_PER_PFLOPS_DAY,
            law.loss(compute) * math.exp(noise[curve, size, run]),
            f"{name} {size} {run}",
        )
        for curve, (name, law) in enumerate(zip(("baseline", "block"), design.laws, strict=True))
        for size, compute in enumerate(design.computes)
        for run in range(design.seeds)
    ]
    return curves_of(points)


def intervals_of_trial(
    design: Design, seed: int, resamples: int
) -> Iterator[tuple[str, float, Interval]]:
    """What is estimated, its true value and its interval."""
    reference, other = design.laws
    fits = [fit_curve(curve, design.form) for curve in noisy_curves(design, seed)]
    found = constant_intervals(fits[0], resamples, seed)
    for name, interval in found.items():
        yield name, getattr(reference, name), interval
    low, high = design.computes[0], design.computes[-1]
    for name, computes in (("at", [high]), ("range", spread_over(low, high))):
        truth = factor_over(reference, other, computes)
        yield name, truth, advantage_of(*fits, computes, resamples, seed).interval


def main() -> None:
    """Print a line per design: how many in a hundred intervals hold the truth, and their width."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--resamples", type=int, default=400)
    arguments = parser.parse_args()
    for design in DESIGNS:
        hits: dict[str, list[bool]] = {}
        widths: dict[str, list[float]] = {}
        for seed in range(arguments.trials):
            for name, truth, interval in intervals_of_trial(design, seed, arguments.resamples):
                hits.setdefault(name, []).append(interval.holds(truth))
                widths.setdefault(name, []).append(interval.high - interval.low)
        cells = [
            f"{name} {100 * np.mean(hits[name]):.1f} ({np.median(widths[name]):.3g})"
            for name in hits
        ]
        print(f"{design!s:<58} {'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
