"""Axes: a few round numbers that span the values of a figure, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_INTERVALS = 5  # at most so many, for whole steps of 1, 2 or 5


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with `ticks` between."""

    low: float
    high: float
    ticks: list[float]

    def share(self, value: float) -> float:
        """Where a value lies, 0 at `low` and 1 at `high`."""
        return (value - self.low) / (self.high - self.low)

    @property
    def labels(self) -> list[str]:
        """The ticks as text, all with the decimals that their distance needs."""
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0
        largest = max(abs(tick) for tick in self.ticks)
        if largest >= 1e7 or step < 1e-5:
            return [f"{tick:.{_digits(largest, step)}e}" if tick else "0" for tick in self.ticks]
        return [f"{tick:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}" for tick in self.ticks]


def axis(values: Iterable[float], *, widened: bool = False, least: float = 0.0) -> Axis:
    """The axis of finite values, of which there has to be one; ticks are multiples of 1, 2 or 5 times a power of ten.

    It ends at the outermost values, or `widened` at the ticks beyond them. Ticks are at least `least` apart.
    """
    given = list(values)
    low, high = min(given), max(given)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value, or as good as one
        half = abs(low) / 2 or 0.5
        low, high = low - half, high + half
    step = max(_round_up((high - low) / _INTERVALS), least)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if widened:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        low, high = first * step, last * step
    return Axis(low, high, [number * step for number in range(first, last + 1)])


def _round_up(step: float) -> float:
    """The next of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(times * power for times in (1, 2, 5, 10) if step <= times * power * (1 + 1e-9))


def _digits(largest: float, step: float) -> int:
    return max(0, math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9))
