"""A calibration of single operators as text: every rate beside the row that it is from."""

from __future__ import annotations

from collections.abc import Iterator

from undertow.planner.calibration.measured import Calibration
from undertow.planner.table import columns
from undertow.planner.timing.operators import COPY, DENSE, MOVERS, UPDATES, OperatorRates
from undertow.planner.timing.rates import Figure

STAYS = (
    "what ranks send each other is priced by priors (docs/how-to/calibrate.md)",
    "memory, its constant included, stays what it is without this calibration",
    "launches, waits of the host, residual sums and casts are not counted, so that a plan is a lower bound",
)
"""What rates of operators cannot know, in sentences."""
_NAMES = {DENSE: "large product", COPY: "large copy"}


def operators_text(calibration: Calibration) -> str:
    """A line a rate, what stays as it was, and warnings."""
    measured, operators = calibration.measured, calibration.rates.operators
    assert operators is not None
    rows = [["operator", "rate", "", "from"]]
    for kind, core in sorted(measured.core.items()):
        for way, figure in (("forward", core.forward), ("backward", core.backward)):
            rows.append([f"attention of {kind} {way}", f"{figure.value:,.4g}", "ms", _from(figure)])
    rows += _rates(operators)
    lines = [f"calibration {measured.name}: operators on one {measured.gpu.name}", *columns(rows, right=(1,))]
    if operators.unused:
        lines.append(f"  {len(operators.unused)} rows that nothing is timed by are named in the file")
    lines += [f"  left as it was: {told}" if told.startswith("memory") else f"  {told}" for told in STAYS]
    return "\n".join([*lines, *(f"  warning: {warning}" for warning in calibration.warnings)])


def _rates(operators: OperatorRates) -> Iterator[list[str]]:
    for rows, found in operators.experts.items():
        for name, figure in found.items():
            yield [f"experts of {rows:,.0f} rows, {name}", f"{figure.value / 1e12:,.0f}", "TFLOP/s", _from(figure)]
    for name, figure in operators.rates.items():
        unit, size = ("GB/s", 1e9) if name in MOVERS else ("TFLOP/s", 1e12)
        if name in UPDATES:
            unit, size = "10^9 elements/s", 1e9
        yield [_NAMES.get(name, name), f"{figure.value / size:,.{1 if name in UPDATES else 0}f}", unit, _from(figure)]


def _from(figure: Figure) -> str:
    return figure.source if figure.mark == "measured" else f"{figure.mark}: {figure.source}"
