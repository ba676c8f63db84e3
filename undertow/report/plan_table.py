"""Tables and bars of a plan's page, as HTML from plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def grid(
    head: Sequence[str], rows: Iterable[Sequence[str]], total: Sequence[str] = (), text: Sequence[int] = ()
) -> str:
    """A table of numbers that scrolls sideways where it is too wide: the first column, and those in `text`, are words.

    A cell with a line break has its second line small.
    """
    heads = "".join(f'<th scope="col"{_kind(n, text)}>{_cell(cell)}</th>' for n, cell in enumerate(head))
    body = "".join(f"<tr>{_cells(row, text)}</tr>" for row in rows)
    last = f'<tr class="sum">{_cells(total, text)}</tr>' if total else ""
    inner = f"<thead><tr>{heads}</tr></thead><tbody>{body}{last}</tbody>"
    return f'<div class="scroll" tabindex="0"><table class="wide">{inner}</table></div>'


def _cells(row: Sequence[str], text: Sequence[int]) -> str:
    return "".join(f"<td{_kind(n, text)}>{_cell(cell)}</td>" for n, cell in enumerate(row))


def _kind(column: int, text: Sequence[int]) -> str:
    return ' class="text"' if column in text else ""


def _cell(cell: str) -> str:
    first, _, second = cell.partition("\n")
    return f"{escape(first)}<small>{escape(second)}</small>" if second else escape(first)


def share_bars(rows: Iterable[tuple[str, float, str]]) -> str:
    """Names with a bar of a share, 0 to 1, the number and the share in percent."""
    lines = (
        f'<tr><td>{escape(name)}</td><td><i style="width:{100 * share:.2f}%"></i></td><td>{escape(number)}</td>'
        f"<td>{share:.2%}</td></tr>"
        for name, share, number in rows
    )
    return f'<div class="scroll"><table class="wide share narrow">{"".join(lines)}</table></div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names with their swatch, given by the attributes of its element."""
    return f'<ul class="legend">{"".join(f"<li><i {kind}></i>{escape(name)}</li>" for kind, name in entries)}</ul>'


def note(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(text)}</p>"
