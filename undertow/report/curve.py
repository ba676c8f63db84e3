"""A loss curve as inline SVG: a line for every step, dots for what was measured now and then."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 720, 280, 44

Point = tuple[float, float]


def loss_curve(steps: Sequence[Point], dots: Sequence[Point], x_name: str, y_name: str) -> str:
    """`steps` as a line and `dots` as circles over common axes, as one `<svg>` element.

    Raises `ValueError` for a curve of no points.
    """
    every = [*steps, *dots]
    if not every:
        raise ValueError("a curve needs at least one point")
    xs, ys = zip(*every, strict=True)
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)

    def at(point: Point) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * (point[0] - left) / ((right - left) or 1)
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (point[1] - low) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    circles = []
    for point in dots:
        x, y = at(point).split(",")
        circles.append(f'<circle cx="{x}" cy="{y}" r="4"><title>{point[1]:.3f}</title></circle>')
    bottom = HEIGHT - MARGIN
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_name)} over {escape(x_name)}">'
        f'<path class="axes" d="M{MARGIN},{MARGIN} V{bottom} H{WIDTH - MARGIN}"/>'
        f'<polyline points="{" ".join(at(point) for point in steps)}"/>{"".join(circles)}'
        f'<text x="{MARGIN}" y="{MARGIN - 12}">{escape(y_name)}: {high:.2f} to {low:.2f}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 16}" text-anchor="end">{escape(x_name)} {left:g} to {right:g}</text>'
        "</svg>"
    )
