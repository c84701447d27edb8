"""Points from a CSV file, and back. No torch.

A header of curve, size, loss and one of flops and pflop_s_days; seed if known. Lines that start
with # say something to people.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_attnres.analysis.scaling_laws.measurements.points import Point
from megatron_attnres.errors import InputError
from megatron_attnres.training.sweeps.planning.budgets import FLOPS_PER_PFLOPS_DAY

NEEDED = ("curve", "size", "loss")
FACTORS = {"flops": 1.0, "pflop_s_days": float(FLOPS_PER_PFLOPS_DAY)}
ALLOWED = (*NEEDED, *FACTORS, "seed")
# No model trains on fewer FLOPs than this, and none on so many PFLOP/s-days.
UNIT_BORDER = 1e9
UNIT_GUESSES = {"flops": "PFLOP/s-days", "pflop_s_days": "FLOPs"}


def read_csv(path: Path) -> list[Point]:
    """All points of a file, in its order.

    Raises:
        InputError: it cannot be read, has other columns or no lines, or a line that holds no point.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"--csv {path}: {error.strerror}; give a readable file") from None
    except ValueError:
        raise InputError(f"--csv {path}: is no UTF-8 text; give a CSV file") from None
    lines = list(_lines(path, text))
    if not lines:
        raise InputError(f"--csv {path}: is empty; give a header and a line per run")
    header = [name.strip() for name in lines[0][1]]
    unit = _unit(path, header)
    if len(lines) == 1:
        raise InputError(f"--csv {path}: has a header and no runs; give a line per run")
    return [_point(f"{path} line {number}", header, cells, unit) for number, cells in lines[1:]]


def csv_text(points: Sequence[Point]) -> str:
    """What ``read_csv`` reads again to the same points, their runs in comments."""
    text = io.StringIO()
    # Names in quotes: one may look like a comment.
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(("curve", "size", "seed", "flops", "loss"))
    for point in points:
        seed = "" if point.seed is None else point.seed
        # float: a whole number of FLOPs reads again as the number that was fitted.
        writer.writerow((point.curve, point.size, seed, float(point.flops), float(point.loss)))
    runs = "".join(f"# {point.run!r}\n" for point in points)
    return f"# Runs, in order:\n{runs}{text.getvalue()}"


def _lines(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of every line that is neither empty nor a comment."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                yield number, next(csv.reader([line], strict=True))
            except csv.Error as error:
                raise InputError(
                    f"--csv {path} line {number}: no CSV ({error}); give cells parted by commas"
                ) from None


def _unit(path: Path, header: Sequence[str]) -> str:
    allowed = f"allowed are {', '.join(ALLOWED)}"
    for name in header:
        if name not in ALLOWED:
            raise InputError(f"--csv {path}: unknown column {name!r}; {allowed}")
        if header.count(name) > 1:
            raise InputError(f"--csv {path}: column {name} is there twice; give it once")
    for name in NEEDED:
        if name not in header:
            raise InputError(f"--csv {path}: has no column {name}; {allowed}")
    units = [name for name in FACTORS if name in header]
    if len(units) != 1:
        found = " and ".join(units) or "neither flops nor pflop_s_days"
        raise InputError(f"--csv {path}: has {found}; give one of the two")
    return units[0]


def _point(place: str, header: Sequence[str], cells: Sequence[str], unit: str) -> Point:
    if len(cells) != len(header):
        raise InputError(
            f"{place}: has {len(cells)} cells, and the header {len(header)}; give one per column"
        )
    row = {name: cell.strip() for name, cell in zip(header, cells, strict=True)}
    for name in ("curve", "size"):
        if not row[name]:
            raise InputError(f"{place}: {name} is empty; give its name")
    compute = _number(place, row, unit)
    is_other_unit = compute > UNIT_BORDER if unit == "pflop_s_days" else compute < UNIT_BORDER
    if is_other_unit:
        raise InputError(
            f"{place}: {unit} is {row[unit]}, which looks like {UNIT_GUESSES[unit]}; give the "
            "column the name of its unit"
        )
    loss = _number(place, row, "loss")
    return Point(row["curve"], row["size"], _seed(place, row), compute * FACTORS[unit], loss, place)


def _number(place: str, row: Mapping[str, str], name: str) -> float:
    try:
        return float(row[name])
    except ValueError:
        raise InputError(f"{place}: {name} is {row[name]!r}; give a number") from None


def _seed(place: str, row: Mapping[str, str]) -> int | None:
    text = row.get("seed", "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{place}: seed is {text!r}; give a whole number or nothing") from None
