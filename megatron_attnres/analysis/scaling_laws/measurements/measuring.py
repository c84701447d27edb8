"""What is fitted, from CSV files or sweeps. No torch."""

from collections.abc import Sequence
from pathlib import Path

from megatron_attnres.analysis.scaling_laws.fits.study import Measurements
from megatron_attnres.analysis.scaling_laws.measurements.collecting import LossKind, collect
from megatron_attnres.analysis.scaling_laws.measurements.csv_points import read_csv
from megatron_attnres.analysis.scaling_laws.measurements.exclusion import split_excluded
from megatron_attnres.analysis.scaling_laws.measurements.learning_rates import (
    check_single,
    take_best,
)


def measured_in_csv(paths: Sequence[Path], exclude: Sequence[str]) -> Measurements:
    """The points of all files but the excluded ones.

    Raises:
        InputError: a file that cannot be used, a pattern that matches nothing.
    """
    points = [point for path in paths for point in read_csv(path)]
    kept, excluded = split_excluded(
        points, lambda point: (point.run, f"{point.size}-{point.curve}", point.curve), exclude
    )
    return Measurements(tuple(kept), tuple(point.run for point in excluded))


def measured_in_sweeps(
    folders: Sequence[Path], kind: LossKind, exclude: Sequence[str], best_learning_rate: bool
) -> Measurements:
    """The runs of all sweeps but the excluded ones, one learning rate for each curve and size.

    Raises:
        InputError: sweeps or runs that cannot be used; several learning rates, unless the best is
            asked for.
    """
    collected = collect(folders, kind, exclude)
    if not best_learning_rate:
        check_single(collected.tried)
        points = tuple(one.point for one in collected.tried)
        return Measurements(points, collected.excluded)
    kept, worse, choices = take_best(collected.tried)
    return Measurements(
        tuple(one.point for one in kept),
        collected.excluded,
        tuple(one.point.run for one in worse),
        tuple(choices),
    )
