"""Tables for people, in columns. Pure."""

from collections.abc import Iterator, Sequence


def table_lines(rows: Sequence[Sequence[str]], text_columns: int) -> Iterator[str]:
    """A line per row, its cells as wide as their columns.

    Args:
        rows: cells, the header's first; all of one length.
        text_columns: the first so many are text and stand on the left, the others on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index < text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
