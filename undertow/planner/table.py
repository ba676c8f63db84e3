"""Aligned columns for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """Lines of a table, two spaces in; the columns in `right` are flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()


def short(value: float) -> str:
    """A number with one decimal, or three digits if it is below ten."""
    return f"{value:,.1f}" if value >= 10 else f"{value:.3g}"
