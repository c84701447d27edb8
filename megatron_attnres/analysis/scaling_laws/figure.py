"""Curves over compute in one picture, in the style of the paper's figure 4. No torch."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_attnres.analysis.scaling_laws.fits.fitting import Fit
from megatron_attnres.analysis.scaling_laws.fits.power_law import Form
from megatron_attnres.analysis.scaling_laws.fits.study import Comparison, Study
from megatron_attnres.analysis.scaling_laws.report import factor_text, range_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (7.5, 5.2)
DOTS_PER_INCH = 150
MARKERS = "osD^vPX*"
LINE_POINTS = 120
# Of a line beyond the points, in parts of their log range.
OVERHANG = 0.06
# Labels of an axis, at most about.
TICKS = 6


def draw_study(study: Study, path: Path) -> None:
    """Draw the points, the fits and the advantage as PNG; one panel a form.

    Raises:
        OSError: the file cannot be written.
    """
    # Loaded on use: it takes longer than everything else. Pyplot would ask for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    forms = list(dict.fromkeys(sure.fit.form for sure in study.fits))
    figure = Figure((SIZE_INCHES[0] * len(forms), SIZE_INCHES[1]), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, form in zip(figure.subplots(1, len(forms), squeeze=False)[0], forms, strict=True):
        _draw_form(axes, study, form)
    figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def _draw_form(axes: "Axes", study: Study, form: Form) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    colours = {curve.name: f"C{index % 10}" for index, curve in enumerate(study.curves)}
    for index, curve in enumerate(study.curves):
        computes = [point.flops for point in curve.points]
        unit = curve.means[0].compute / curve.points[0].flops
        axes.scatter(
            [flops * unit for flops in computes],
            [point.loss for point in curve.points],
            s=30,
            marker=MARKERS[index % len(MARKERS)],
            color=colours[curve.name],
            zorder=3,
        )
    for sure in study.fits:
        if sure.fit.form is form:
            _draw_line(axes, sure.fit, colours[sure.fit.curve.name])
    comparisons = [one for one in study.comparisons if one.form is form]
    if comparisons:
        # The best of them, as several arrows would lie on each other.
        best = max(comparisons, key=lambda one: one.at.factor)
        _draw_advantage(axes, best, colours[best.other.curve.name])
    _label(axes, form)


def _draw_line(axes: "Axes", fit: Fit, colour: str) -> None:
    low, high = math.log(fit.curve.smallest), math.log(fit.curve.largest)
    margin = OVERHANG * (high - low)
    computes = np.exp(np.linspace(low - margin, high + margin, LINE_POINTS))
    losses = [fit.law.loss(float(compute)) for compute in computes]
    name = f"{_plain(fit.curve.name)}: {_formula(fit)}"
    axes.plot(computes, losses, linestyle="--", linewidth=1.4, color=colour, label=name)


def _draw_advantage(axes: "Axes", one: Comparison, colour: str) -> None:
    """From the curve to the reference, at the same loss; the factor is the distance."""
    if not 0 < one.at.factor < math.inf:
        return
    loss = one.other.law.loss(one.compute)
    there = one.compute * one.at.factor
    # The reference's line ends before that, where the curve is ahead at the largest compute.
    ends = sorted((one.compute, there))
    beyond = np.geomspace(max(ends[0], one.reference.curve.smallest), ends[1], LINE_POINTS)
    losses = [one.reference.law.loss(float(compute)) for compute in beyond]
    axes.plot(beyond, losses, linestyle=":", linewidth=1.0, color="0.5")
    style = {"arrowstyle": "<->", "color": "0.2", "shrinkA": 0, "shrinkB": 0, "linewidth": 1.2}
    axes.annotate("", (there, loss), (one.compute, loss), arrowprops=style, zorder=4)
    text = f"{factor_text(one.at.factor)} compute\n({range_text(one.at.interval)})"
    axes.annotate(
        text,
        (ends[0], loss),
        (-4, -8),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=9,
        color=colour,
    )


def _label(axes: "Axes", form: Form) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    axes.set_xlabel("PFLOP/s-days")
    axes.set_ylabel("validation loss (nats per token)")
    # Losses lie within a decade, where a logarithmic axis would show no or all minor ticks.
    axes.yaxis.set_major_locator(MaxNLocator(TICKS, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axes.get_xlim()
    axes.set_xticks(_round_numbers(low, high))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _compute_text(value)))
    axes.set_xlim(low, high)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, title=f"form {form}", title_fontsize=9)


def _round_numbers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten; only the powers where these are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        found = [digit * 10.0**power for power in powers for digit in digits]
        found = [one for one in found if low <= one <= high]
        if len(found) <= TICKS + 2:
            return found
    return found[:: math.ceil(len(found) / TICKS)]


def _compute_text(value: float) -> str:
    """Small ones as 2 x 10^-8, as nobody counts the zeros."""
    if 1e-2 <= value < 1e4:
        return f"{value:g}"
    power = math.floor(math.log10(value) + 1e-9)
    digit = round(value / 10.0**power)
    return f"$10^{{{power}}}$" if digit == 1 else rf"${digit}\times10^{{{power}}}$"


def _formula(fit: Fit) -> str:
    law = fit.law
    power = rf"{law.coefficient:.4g} $\times$ $C^{{-{law.exponent:.3f}}}$"
    return power if fit.form is Form.POWER else f"{law.offset:.4g} + {power}"


def _plain(name: str) -> str:
    """A name that matplotlib takes for no formula, nor for one that legends leave out."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")
