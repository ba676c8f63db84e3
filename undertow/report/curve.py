"""A figure: lines for what every step tells, dots for what was measured now and then, over axes with values.

Only the lines are SVG, stretched to the width there is; numbers and names are text of the page and keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from undertow.report.axis import Axis, axis

WIDTH, HEIGHT = 1000, 300  # of the drawing, in its own units
_BUCKETS = 400  # of a line: finer than most screens, and the page is one file

Point = tuple[float, float | None]


def curve(
    lines: Mapping[str, Sequence[Point]], x_name: str, y_name: str, dots: Mapping[str, Sequence[Point]] | None = None
) -> str:
    """Named `lines`, and named `dots` joined by a line, as one `<figure>` element.

    Points are in the order of x, a whole number. A value that is None or not finite breaks the line. Raises
    `ValueError` where no point is left.
    """
    series = {name: _thinned(_sound(points)) for name, points in lines.items()}
    marked = {name: _thinned(_sound(points)) for name, points in (dots or {}).items()}
    every = {name: points for name, points in (series | marked).items() if any(y is not None for _, y in points)}
    values = [y for points in every.values() for _, y in points if y is not None]
    if not values:
        raise ValueError("a curve needs at least one point")
    # Steps without a value count for the width: a gap at an end is seen, too.
    across, up = axis((x for points in every.values() for x, _ in points), least=1.0), axis(values, widened=True)
    drawn = [f'<path class="grid" d="{_grid(up)}"/>']
    for number, (name, points) in enumerate(every.items()):
        title = f"<title>{escape(name)}</title>"
        drawn.append(f'<path class="line c{number}" d="{_path(points, across, up)}">{title}</path>')
        if name in marked:
            drawn += [_dot(f"c{number}", name, x, y, across, up) for x, y in points if y is not None]
    picture = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(y_name)} over {escape(x_name)}">{"".join(drawn)}</svg>'
    )
    return (
        f'<figure><figcaption>{escape(y_name)}{_legend(list(every))}</figcaption><div class="plot">{picture}'
        f'<div class="y">{ticks(up, "bottom")}</div><div class="x">{ticks(across, "left")}</div></div>'
        f'<div class="x-name">{escape(x_name)}</div></figure>'
    )


def _sound(points: Sequence[Point]) -> list[Point]:
    return [(x, y if y is not None and math.isfinite(y) else None) for x, y in points]


def _thinned(points: list[Point]) -> list[Point]:
    """Of each bucket of neighbours the least and the greatest value; gaps and both ends stay."""
    if len(points) <= 2 * _BUCKETS:
        return points
    kept = {0, len(points) - 1} | {place for place, (_, y) in enumerate(points) if y is None}
    edges = [round(number * len(points) / _BUCKETS) for number in range(_BUCKETS + 1)]
    for begin, end in pairwise(edges):
        known = [(y, place) for place in range(begin, end) if (y := points[place][1]) is not None]
        kept |= {min(known)[1], max(known)[1]} if known else set()
    return [points[place] for place in sorted(kept)]


def _at(x: float, y: float, across: Axis, up: Axis) -> str:
    return f"{WIDTH * across.share(x):.1f},{HEIGHT * (1 - up.share(y)):.1f}"


def _path(points: Sequence[Point], across: Axis, up: Axis) -> str:
    """Moves and lines; a point between two gaps is a line of no length, which round ends make visible."""
    drawn, joined = [], False
    for x, y in points:
        if y is not None:
            drawn.append(f"{'L' if joined else 'M'}{_at(x, y, across, up)}{'' if joined else 'h0'}")
        joined = y is not None
    return "".join(drawn)


def _dot(kind: str, name: str, x: float, y: float, across: Axis, up: Axis) -> str:
    title = f"<title>{escape(name)}: {y:.4g} at {x:,g}</title>"
    return f'<path class="dot {kind}" d="M{_at(x, y, across, up)}h0">{title}</path>'


def _grid(up: Axis) -> str:
    return "".join(f"M0,{HEIGHT * (1 - up.share(tick)):.1f}H{WIDTH}" for tick in up.ticks)


def ticks(of: Axis, side: str) -> str:
    """The labels of an axis as elements, each as far from a `side` of the figure as its value says."""
    placed = zip(of.ticks, of.labels, strict=True)
    return "".join(f'<span style="{side}:{100 * of.share(tick):.2f}%">{label}</span>' for tick, label in placed)


def _legend(names: list[str]) -> str:
    if len(names) < 2:
        return ""
    return "".join(f'<span class="c{number}">{escape(name)}</span>' for number, name in enumerate(names))
