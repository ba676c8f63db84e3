"""Fits rates to the measured seconds of runs, and a constant to their measured peaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from pathlib import Path

from undertow.config.clusters import Pool
from undertow.config.errors import ConfigError
from undertow.config.gpus import Gpu
from undertow.config.layout import parse_layout
from undertow.planner.calibration.file import rates_of, read_measurements, shipped_calibration
from undertow.planner.calibration.least_squares import NUDGE, STEPS, RowErrors, descend, dot
from undertow.planner.calibration.measured import Calibration, Errors, Measurements, Row, check_constant
from undertow.planner.memory.recompute import read_recompute
from undertow.planner.pipeline.run import pipeline_timeline
from undertow.planner.task import Task
from undertow.planner.timing.costs import MicrobatchShape, model_times
from undertow.planner.timing.rates import Figure, Rates

MISFIT = 0.03
"""Share by which a fitted row may differ from a measured one before that is a warning."""

_STARTS = (0.25, 0.5, 1.0, 2.0, 4.0)
_STATE = ("weights", "gradient buffers", "optimizer state")
_MEGABYTE = 10**6


def fit_calibration(path: Path, own: tuple[Gpu, ...] = ()) -> Calibration:
    """Measurements of a file, fitted. Raises `ConfigError` for a file or rows that cannot be used."""
    return fit(read_measurements(path, own))


def fit(measured: Measurements) -> Calibration:
    """Rates and memory constant of measured runs, with the error of every row.

    Rates start from the shipped ones. Raises `ConfigError` for rows that no run can have.
    """
    rates, warnings = _rates(measured)
    constant = fit_constant(measured)
    check_constant(measured, constant)
    found = Calibration(measured, rates, constant)
    errors = tuple(_errors(row, found) for row in measured.rows)
    return replace(found, errors=errors, warnings=(*warnings, *_misfits(measured, errors)))


def task_of(row: Row, calibration: Calibration) -> Task:
    """A measured run as a task."""
    measured = calibration.measured
    return Task(
        measured.name,
        Pool(measured.geometry.gpus, measured.gpu),
        measured.microbatch(row.microbatches),
        measured.profile,
        row.schedule,
        len(parse_layout(row.layout).stages) // measured.geometry.pipeline,
        measured.frozen_indexer,
        calibration,
    )


def seconds_of(row: Row, calibration: Calibration) -> float:
    """Simulated seconds of an iteration of a measured run, whose own traffic is in the rates."""
    measured, layout = calibration.measured, parse_layout(row.layout)
    geometry = measured.geometry
    shape = MicrobatchShape(
        measured.config,
        measured.sequence_length,
        measured.micro_batch,
        geometry.sequence_ranks,
        measured.frozen_indexer,
    )
    run = pipeline_timeline(
        layout,
        model_times(shape, calibration.rates),
        ranks=geometry.pipeline,
        microbatches=row.microbatches,
        schedule=row.schedule,
        recompute=read_recompute(row.recompute, layout),
        transfer=measured.transfer_seconds,
    )
    return float(run.seconds)


def fit_constant(measured: Measurements) -> int | None:
    """Bytes of a rank beyond state and saved activations, to the megabyte: the mean over the rows with a peak, each
    taken at its fullest rank.

    Raises `ConfigError` for a peak below the projected state alone.
    """
    rest = []
    for row in measured.rows:
        if row.peak_bytes is None:
            continue
        bare = Calibration(measured, shipped_calibration().rates, 0)
        layout = parse_layout(row.layout)
        memory = task_of(row, bare).memory(layout, read_recompute(row.recompute, layout))
        state = max(sum(map(rank.bytes_of, _STATE)) for rank in memory.stages)
        if row.peak_bytes < state:
            raise ConfigError(
                f"calibration {measured.name}: the peak of row '{row}' is {row.peak_bytes:,} bytes, below the state "
                f"alone, {state:,} bytes in profile {measured.profile.name}; was another profile or GPU measured?"
            )
        rest.append(row.peak_bytes - memory.peak.total_bytes)
    return round(sum(rest) / len(rest) / _MEGABYTE) * _MEGABYTE if rest else None


def fit_rates(measured: Measurements, rates: Rates, rows: Sequence[Row], source: str) -> Rates:
    """The rates of matrices and heads with which the simulation comes nearest to measured rows.

    Least squares of relative errors by Gauss-Newton, from `rates` on and from other rates of the heads, for there are
    several minima: which stage is the slowest depends on the rates. Of equally good ones the nearest is taken. The
    times of the attention core stay. Raises `ConfigError` where the rows do not tell the two apart.
    """
    at, errors = _trials(measured, rates, rows, source)
    found = [minimum for start in _STARTS if (minimum := descend(errors, start))]
    if not found:
        raise ConfigError(f"{len(rows)} rows do not determine two rates; give runs that differ in their slowest stage")

    def rank(minimum: tuple[float, float]) -> tuple[float, float]:
        here = errors(*minimum)
        return round(dot(here, here), 9), abs(log(minimum[1]))

    return at(*min(found, key=rank))


def fit_one_rate(measured: Measurements, rates: Rates, rows: Sequence[Row], source: str) -> Rates:
    """Both rates with their ratio held, as near to measured rows as that comes; `ConfigError` where nothing does."""
    at, errors = _trials(measured, rates, rows, source)
    factor = 1.0
    for _ in range(STEPS):
        here, there = errors(factor, factor), errors(factor * (1 + NUDGE), factor * (1 + NUDGE))
        slope = [(b - a) / NUDGE for a, b in zip(here, there, strict=True)]
        change = -dot(slope, here) / dot(slope, slope) if any(slope) else -1.0
        factor *= 1 + max(change, -0.9)
        if abs(change) < 1e-7:
            return at(factor, factor)
    raise ConfigError(
        f"calibration {measured.name}: no rate explains its {len(rows)} rows; their seconds may be less than the "
        "attention core and transfers take alone"
    )


def _trials(
    measured: Measurements, rates: Rates, rows: Sequence[Row], source: str
) -> tuple[Callable[[float, float], Rates], RowErrors]:
    """Rates by their factors, and the errors of rows at such rates."""

    def at(matrix: float, head: float) -> Rates:
        return replace(
            rates,
            matrix_tflops=Figure(rates.matrix_tflops.value * matrix, "fitted", source),
            head_tflops=Figure(rates.head_tflops.value * head, "fitted", source),
        )

    def errors(matrix: float, head: float) -> list[float]:
        trial = Calibration(measured, at(matrix, head))
        return [seconds_of(row, trial) / row.seconds - 1 for row in rows if row.seconds]

    return at, errors


def _rates(measured: Measurements) -> tuple[Rates, tuple[str, ...]]:
    """Fitted rates, to two decimals, and what is to be said of them."""
    rows = [row for row in measured.rows if row.seconds]
    near = shipped_calibration().rates_of(measured.gpu)
    start = rates_of(measured, near.matrix_tflops, near.head_tflops)
    if not rows:
        if start.matrix_tflops.mark == "fitted":
            start = start.scaled(measured.gpu.name, 1.0)
        return start, ("no row has seconds: rates are the shipped ones, in proportion to the peak in BF16",)
    _check_floor(measured, start, rows)
    source = f"fit over {len(rows)} runs of {measured.preset} on {measured.geometry.gpus} {measured.gpu.name}"
    warnings: tuple[str, ...] = ()
    try:
        found = fit_rates(measured, start, rows, source)
        if found.head_tflops.value * 1e12 > measured.gpu.bf16:
            raise ConfigError("the rate of logits exceeds the peak")
    except ConfigError:
        source += ", ratio of logits to matrices held"
        found = fit_one_rate(measured, start, rows, source)
        ratio = start.head_tflops.value / start.matrix_tflops.value
        warnings = (
            f"the rows with seconds ({len(rows)}) do not tell the rates of matrices and logits apart: their ratio is "
            f"held at the shipped {ratio:.2f}; measure layouts that differ in their slowest stage",
        )
    matrix, heads = (
        replace(figure, value=round(figure.value, 2)) for figure in (found.matrix_tflops, found.head_tflops)
    )
    return replace(found, matrix_tflops=matrix, head_tflops=heads), warnings


def _check_floor(measured: Measurements, start: Rates, rows: Sequence[Row]) -> None:
    """Raises `ConfigError` for a row that is quicker than the GPU's peak allows."""
    peak = Figure(measured.gpu.bf16 / 1e12, "scaled", "peak in BF16")
    fastest = Calibration(measured, replace(start, matrix_tflops=peak, head_tflops=peak))
    for row in rows:
        floor = seconds_of(row, fastest)
        if row.seconds is not None and row.seconds < floor:
            raise ConfigError(
                f"calibration {measured.name}: row '{row}' took {row.seconds:.4g} s, less than the {floor:.4g} s at "
                f"the peak of {measured.gpu.name}; check seconds, microbatches and gpus"
            )


def _errors(row: Row, calibration: Calibration) -> Errors:
    seconds = seconds_of(row, calibration) / row.seconds - 1 if row.seconds else None
    if row.peak_bytes is None:
        return Errors(_digits(seconds))
    layout = parse_layout(row.layout)
    memory = task_of(row, calibration).memory(layout, read_recompute(row.recompute, layout))
    return Errors(_digits(seconds), _digits(memory.peak.total_bytes / row.peak_bytes - 1))


def _digits(error: float | None) -> float | None:
    return None if error is None else round(error, 6)


def _misfits(measured: Measurements, errors: Sequence[Errors]) -> tuple[str, ...]:
    found = []
    for row, each in zip(measured.rows, errors, strict=True):
        for name, error in (("seconds", each.seconds), ("peak_bytes", each.peak_bytes)):
            if error is not None and abs(error) > MISFIT:
                found.append(f"{name} of row '{row}' come out {error:+.1%} against what was measured")
    return tuple(found)
