"""Fits the two rates to the measured seconds of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log

from undertow.config.errors import ConfigError
from undertow.planner.costs import MicrobatchShape, first_layers, model_times
from undertow.planner.layout import parse_layout
from undertow.planner.pipeline import pipeline_timeline
from undertow.planner.rates import Figure, Rates, Row

_STEPS, _NUDGE = 20, 1e-4
_STARTS = (0.25, 0.5, 1.0, 2.0, 4.0)


def seconds_of(row: Row, shape: MicrobatchShape, rates: Rates) -> float:
    """Simulated seconds of an iteration of a measured run, under 1F1B."""
    layout = parse_layout(row.layout)
    recompute, times = first_layers(layout, row.recomputed), model_times(shape, rates)
    run = pipeline_timeline(layout, times, ranks=row.ranks, microbatches=row.microbatches, recompute=recompute)
    return float(run.seconds)


def fit_rates(shape: MicrobatchShape, rates: Rates, rows: Sequence[Row], source: str) -> Rates:
    """The rates of matrices and heads with which the simulation comes nearest to measured rows.

    Least squares of relative errors by Gauss-Newton, from `rates` on and from other rates of the heads, for there are
    several minima: which stage is the slowest depends on the rates. Of equally good ones the nearest is taken. The
    times of the attention core stay. Raises `ConfigError` where the rows do not tell the two apart.
    """

    def at(matrix: float, head: float) -> Rates:
        return replace(
            rates,
            rows=tuple(rows),
            matrix_tflops=Figure(rates.matrix_tflops.value * matrix, "fitted", source),
            head_tflops=Figure(rates.head_tflops.value * head, "fitted", source),
        )

    def errors(matrix: float, head: float) -> list[float]:
        return [seconds_of(row, shape, at(matrix, head)) / row.seconds - 1 for row in rows]

    found = [minimum for start in _STARTS if (minimum := _descend(errors, start))]
    if not found:
        raise ConfigError(f"{len(rows)} rows do not determine two rates; give runs that differ in their slowest stage")

    def rank(minimum: tuple[float, float]) -> tuple[float, float]:
        here = errors(*minimum)
        return round(_dot(here, here), 9), abs(log(minimum[1]))

    return at(*min(found, key=rank))


def _descend(errors: Callable[[float, float], list[float]], head: float) -> tuple[float, float] | None:
    """Factors of both rates at a minimum of the squared errors, if one is found from here."""
    matrix = 1.0
    for _ in range(_STEPS):
        here = errors(matrix, head)
        by_matrix = [(e - h) / _NUDGE for e, h in zip(errors(matrix * (1 + _NUDGE), head), here, strict=True)]
        by_head = [(e - h) / _NUDGE for e, h in zip(errors(matrix, head * (1 + _NUDGE)), here, strict=True)]
        step = _step(by_matrix, by_head, here)
        if step is None or min(step) <= -1:
            return None
        matrix, head = matrix * (1 + step[0]), head * (1 + step[1])
        if max(map(abs, step)) < 1e-6:
            return matrix, head
    return None


def _step(a: Sequence[float], b: Sequence[float], errors: Sequence[float]) -> tuple[float, float] | None:
    """Relative changes that bring the linearised errors nearest to zero: normal equations of two unknowns."""
    aa, ab, bb = _dot(a, a), _dot(a, b), _dot(b, b)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:
        return None
    ae, be = _dot(a, errors), _dot(b, errors)
    return (ab * be - bb * ae) / determinant, (ab * ae - aa * be) / determinant


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
