"""A figure as inline SVG: lines for what every step tells, dots for what was measured now and then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 720, 280, 44
_MOST = 800  # points of a line: more are finer than the screen, and the page is one file

Point = tuple[float, float | None]


def curve(
    lines: Mapping[str, Sequence[Point]], x_name: str, y_name: str, dots: Mapping[str, Sequence[Point]] | None = None
) -> str:
    """Named `lines`, and named `dots` as circles, over common axes, as one `<svg>` element.

    A point whose value is None, or is not finite, is a gap. Raises `ValueError` where no point is left.
    """
    kept = {name: _thinned(_sound(points)) for name, points in lines.items()}
    marked = {name: _sound(points) for name, points in (dots or {}).items()}
    every = [point for points in (*kept.values(), *marked.values()) for point in points]
    if not every:
        raise ValueError("a curve needs at least one point")
    xs, ys = zip(*every, strict=True)
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / ((right - left) or 1)
        up = (y - low) / ((high - low) or 1)
        return MARGIN + (WIDTH - 2 * MARGIN) * across, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * up

    drawn = []
    for number, (name, points) in enumerate(kept.items()):
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in points)
        drawn.append(f'<polyline class="line{number}" points="{path}"><title>{escape(name)}</title></polyline>')
    for name, points in marked.items():
        for x, y in points:
            cx, cy = at(x, y)
            title = f"{escape(name)}: {y:.4g} at {x:g}"
            drawn.append(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4"><title>{title}</title></circle>')
    bottom = HEIGHT - MARGIN
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_name)} over {escape(x_name)}">'
        f'<path class="axes" d="M{MARGIN},{MARGIN} V{bottom} H{WIDTH - MARGIN}"/>{"".join(drawn)}'
        f'<text x="{MARGIN}" y="{MARGIN - 12}">{escape(y_name)}: {low:.4g} to {high:.4g}</text>'
        f"{_legend([*kept, *marked])}"
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 16}" text-anchor="end">{escape(x_name)} {left:g} to {right:g}</text>'
        "</svg>"
    )


def _sound(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_MOST` of the points, evenly taken, the last among them."""
    if len(points) <= _MOST:
        return points
    return [points[round(i * (len(points) - 1) / (_MOST - 1))] for i in range(_MOST)]


def _legend(names: list[str]) -> str:
    if len(names) < 2:
        return ""
    return f'<text x="{WIDTH - MARGIN}" y="{MARGIN - 12}" text-anchor="end">{escape(", ".join(names))}</text>'
