"""Least squares of two factors, by Gauss-Newton with differences for slopes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

STEPS, NUDGE = 20, 1e-4

RowErrors = Callable[[float, float], list[float]]
"""Errors of rows from a factor of the rate of matrices and one of that of heads."""


def descend(errors: RowErrors, head: float) -> tuple[float, float] | None:
    """Factors of both rates at a minimum of the squared errors, if one is found from here."""
    matrix = 1.0
    for _ in range(STEPS):
        here = errors(matrix, head)
        by_matrix = [(e - h) / NUDGE for e, h in zip(errors(matrix * (1 + NUDGE), head), here, strict=True)]
        by_head = [(e - h) / NUDGE for e, h in zip(errors(matrix, head * (1 + NUDGE)), here, strict=True)]
        step = _step(by_matrix, by_head, here)
        if step is None or min(step) <= -1:
            return None
        matrix, head = matrix * (1 + step[0]), head * (1 + step[1])
        if max(map(abs, step)) < 1e-6:
            return matrix, head
    return None


def _step(a: Sequence[float], b: Sequence[float], errors: Sequence[float]) -> tuple[float, float] | None:
    """Relative changes that bring the linearised errors nearest to zero: normal equations of two unknowns."""
    aa, ab, bb = dot(a, a), dot(a, b), dot(b, b)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:
        return None
    ae, be = dot(a, errors), dot(b, errors)
    return (ab * be - bb * ae) / determinant, (ab * ae - aa * be) / determinant


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """Sum of products."""
    return sum(x * y for x, y in zip(a, b, strict=True))
