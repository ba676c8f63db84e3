"""A calibration as text: every measured row beside what the fit makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from undertow.planner.calibration.measured import Calibration
from undertow.planner.calibration.operators_text import operators_text


def calibration_text(calibration: Calibration) -> str:
    """Rates, constant, a line a row (measured, fitted, error), and warnings; of operators, see `operators_text`."""
    if calibration.of_operators:
        return operators_text(calibration)
    measured, rates = calibration.measured, calibration.rates
    lines = [
        f"calibration {measured.name}: {measured.preset} on {measured.geometry.gpus}x{measured.gpu.name}, "
        f"implementation {measured.implementation}",
        f"  {rates.matrix_tflops.value:,.2f} TFLOP/s of matrices, {rates.head_tflops.value:,.2f} of logits "
        f"({rates.matrix_tflops.mark})",
    ]
    if calibration.constant is not None:
        peaks = [
            (abs(error.peak_bytes), row)
            for row, error in zip(calibration.rows, calibration.errors, strict=True)
            if error.peak_bytes is not None
        ]
        error, row = max(peaks, key=lambda pair: pair[0])
        lines.append(f"  {calibration.constant / 1e9:,.3f} GB of constant memory, at worst {error:.2%} off: '{row}'")
    lines += _columns([["s", "fitted", "error", "GB", "fitted", "error", "row"], *_rows(calibration)])
    lines += [f"  {told}" for told in _told_by(calibration)]
    return "\n".join([*lines, *(f"  warning: {warning}" for warning in calibration.warnings)])


def _told_by(calibration: Calibration) -> Iterator[str]:
    """In sentences, that there are no more rows than what is fitted to them, where that is so: then errors are zero
    whatever was measured."""
    held = calibration.rates.matrix_tflops.source.endswith("held")
    rates = "1 rate, the ratio of logits to matrices being held" if held else "2 rates"
    timed = sum(row.seconds is not None for row in calibration.rows)
    if 0 < timed <= (1 if held else 2):
        yield f"seconds: {timed} measured for {rates}; their errors say nothing about the fit"
    if sum(row.peak_bytes is not None for row in calibration.rows) == 1:
        yield "GB: 1 peak measured for 1 constant; its error says nothing about the fit"


def _rows(calibration: Calibration) -> Iterator[list[str]]:
    for row, error in zip(calibration.rows, calibration.errors, strict=True):
        seconds = _three(row.seconds, error.seconds, 1.0)
        yield [*seconds, *_three(row.peak_bytes, error.peak_bytes, 1e9), f"{row}, {row.schedule}"]


def _three(measured: float | None, error: float | None, unit: float) -> tuple[str, str, str]:
    if measured is None or error is None:
        return "-", "-", "-"
    return f"{measured / unit:,.5g}", f"{measured * (1 + error) / unit:,.5g}", f"{error:+.2%}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  " + "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ]
