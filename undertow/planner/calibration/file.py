"""Calibrations as JSON: the one that is shipped, and those of users."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, get_args

from undertow.config.clusters import LARGEST_POOL
from undertow.config.errors import ConfigError
from undertow.config.gpus import GPUS, Gpu
from undertow.config.layout import check_layout, parse_layout
from undertow.config.model import LayerKind, ModelConfig
from undertow.config.presets import PRESETS
from undertow.config.writing import write_file
from undertow.model.flops import layer_flops
from undertow.planner.calibration.fields import Fields, read_fields
from undertow.planner.calibration.measured import Calibration, Errors, Measurements, Row, check_constant
from undertow.planner.calibration.operators_file import operators_document, operators_of
from undertow.planner.geometry import build_geometry, check_batch, check_model
from undertow.planner.memory.activations import Implementation
from undertow.planner.memory.recompute import read_recompute
from undertow.planner.memory.state import OWN, PUBLISHED, state_profile
from undertow.planner.pipeline.schedules import ScheduleName, build_schedule, placement_of
from undertow.planner.timing.rates import Core, Figure, Mark, Rates

FORMAT = 1
SHIPPED = "mi355x-v4-flash"
_MOST_ROWS = 1000
_BYTES, _SECONDS, _TFLOPS = 10**15, 1e7, 1e6
_WIDTHS = ("tensor", "pipeline", "expert", "context")


@cache
def shipped_calibration() -> Calibration:
    """The published pretraining of v4-flash on 32 MI355X."""
    return read_calibration(Path(__file__).parent / "runs" / f"{SHIPPED}.json")


def read_measurements(path: Path, own: tuple[Gpu, ...] = ()) -> Measurements:
    """Measured runs, whatever was fitted to them before. `own` are GPUs beside the catalogue's.

    Raises `ConfigError` in one sentence that names the file, the field, its value and what is allowed.
    """
    fields = read_fields(path)
    measured = _measurements(fields, own)
    fields.take("fitted")
    fields.done()
    return measured


def read_calibration(path: Path, own: tuple[Gpu, ...] = ()) -> Calibration:
    """Measured runs with what was fitted to them, or rates of operators, as `write_calibration` leaves them. Raises as
    `read_measurements`."""
    fields = read_fields(path)
    if fields.has("kind"):
        return operators_of(fields, own)
    measured = _measurements(fields, own)
    if not fields.has("fitted"):
        raise ConfigError(f"{path}: fitted is missing, these are measurements alone; fit them first with --calibrate")
    found = _fitted(measured, fields.object("fitted"))
    fields.done()
    return found


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Replace a file in one step. Raises `InputError` where it cannot be written."""
    write_file(path, json.dumps(calibration_document(calibration), indent=2) + "\n", "choose another folder")


def calibration_document(calibration: Calibration) -> dict[str, Any]:
    """A calibration as plain values: what `read_calibration` takes."""
    if calibration.of_operators:
        return operators_document(calibration)
    measured, geometry = calibration.measured, calibration.measured.geometry
    core = {
        kind: {"forward": times.forward.value, "backward": times.backward.value}
        for kind, times in measured.core.items()
    }
    origin = next((times.forward.source for times in measured.core.values()), "")
    changed = {
        key: value
        for key, value in measured.config.model_dump().items()
        if value != getattr(ModelConfig.from_preset(measured.preset), key)
    }
    rates = calibration.rates
    return {
        "format": FORMAT,
        "name": measured.name,
        "source": measured.source,
        "date": measured.date,
        "commit": measured.commit,
        "gpu": measured.gpu.name,
        "gpus": geometry.gpus,
        "model": {"preset": measured.preset, **changed},
        "frozen_indexer": measured.frozen_indexer,
        "sequence_length": measured.sequence_length,
        "micro_batch": measured.micro_batch,
        **{name: getattr(geometry, name) for name in _WIDTHS},
        "implementation": measured.implementation,
        "state": measured.profile.name,
        "attention_core_ms": {"origin": origin, **core} if core else None,
        "saved_bytes": dict(measured.saved) or None,
        "transfer_seconds": measured.transfer_seconds,
        "rows": [_row_document(row) for row in calibration.rows],
        "fitted": {
            "matrix_tflops": rates.matrix_tflops.value,
            "head_tflops": rates.head_tflops.value,
            "mark": rates.matrix_tflops.mark,
            "origin": rates.matrix_tflops.source,
            "constant_bytes": calibration.constant,
            "errors": [{"seconds": each.seconds, "peak_bytes": each.peak_bytes} for each in calibration.errors],
            "warnings": list(calibration.warnings),
        },
    }


def _row_document(row: Row) -> dict[str, Any]:
    return {
        "layout": row.layout,
        "recompute": row.recompute,
        "schedule": row.schedule,
        "microbatches": row.microbatches,
        "seconds": row.seconds,
        "peak_bytes": row.peak_bytes,
    }


def _measurements(fields: Fields, own: tuple[Gpu, ...]) -> Measurements:
    fields.whole("format", FORMAT, FORMAT, FORMAT)
    known = {gpu.name: gpu for gpu in (*GPUS, *own)}
    model = fields.object("model")
    preset = model.choice("preset", list(PRESETS))
    length = fields.whole("sequence_length", 1, 2**31)
    widths = {name: fields.whole(name, 1, LARGEST_POOL, 1) for name in _WIDTHS}
    try:
        config = ModelConfig.from_preset(preset, **model.rest())
        geometry = build_geometry(fields.whole("gpus", 1, LARGEST_POOL), **widths)
        check_model(config, geometry)
    except ConfigError as error:
        raise _placed(fields, error) from None
    gpu = known[fields.choice("gpu", list(known))]
    measured = Measurements(
        name=fields.text("name", fields.path.stem),
        source=fields.text("source", "not given"),
        date=fields.text("date", "unknown"),
        commit=fields.text("commit", "unknown"),
        gpu=gpu,
        config=config,
        preset=preset,
        frozen_indexer=fields.flag("frozen_indexer", False),
        sequence_length=length,
        micro_batch=fields.whole("micro_batch", 1, 2**20, 1),
        geometry=geometry,
        implementation=fields.choice("implementation", get_args(Implementation)),
        profile=state_profile(fields.choice("state", (*PUBLISHED, *OWN))),
        rows=(),
        core=_core(fields, config, length),
        saved=_saved(fields),
        transfer_seconds=fields.number("transfer_seconds", 0, 60, 0.0),
    )
    rows = tuple(_row(each, measured, gpu) for each in fields.objects("rows", _MOST_ROWS))
    return Measurements(**{**vars(measured), "rows": rows})


def _placed(fields: Fields, error: ConfigError) -> ConfigError:
    told = str(error)
    return error if told.startswith(str(fields.path)) else ConfigError(f"{fields.path}: {told}")


def _core(fields: Fields, config: ModelConfig, length: int) -> dict[LayerKind, Core]:
    """Measured milliseconds of the attention core on one row, for every kind of layer that the model has."""
    if not fields.has("attention_core_ms"):
        fields.take("attention_core_ms")
        return {}
    given = fields.object("attention_core_ms")
    origin = given.text("origin")
    layers: dict[LayerKind, int] = {config.kind(layer): layer for layer in range(len(config.compress_ratios))}
    found: dict[LayerKind, Core] = {}
    for kind, layer in sorted(layers.items()):
        each = given.object(kind)
        forward, backward = (each.number(way, 0, 1e6) for way in ("forward", "backward"))
        each.done()
        operations = layer_flops(config, layer, length)["scores"]
        found[kind] = Core(Figure(forward, "measured", origin), Figure(backward, "measured", origin), operations)
    given.done()
    return found


def _saved(fields: Fields) -> dict[str, int]:
    if not fields.has("saved_bytes"):
        fields.take("saved_bytes")
        return {}
    given = fields.object("saved_bytes")
    found = {kind: given.whole(kind, 1, _BYTES) for kind in get_args(LayerKind) if given.has(kind)}
    given.done()
    return found


def _row(fields: Fields, measured: Measurements, gpu: Gpu) -> Row:
    """A row whose layout, schedule and recomputation suit the model and the ranks."""
    schedule: ScheduleName = fields.choice("schedule", get_args(ScheduleName), "1f1b")
    recompute, ranks = fields.text("recompute", "none"), measured.geometry.pipeline
    microbatches = fields.whole("microbatches", 1, 10_000)
    try:
        layout = parse_layout(fields.text("layout"))
        chunks = check_layout(layout, measured.config, ranks, placement_of(schedule))
        build_schedule(schedule, ranks, microbatches, chunks)
        read_recompute(recompute, layout)
        check_batch(measured.config, measured.geometry, measured.microbatch(microbatches).batch)
    except ConfigError as error:
        told = str(error)
        raise (
            error if told.startswith(str(fields.path)) else ConfigError(f"{fields.path}: {fields.place}: {told}")
        ) from None
    seconds = fields.number("seconds", 0, _SECONDS) if fields.has("seconds") else None
    peak = fields.whole("peak_bytes", 1, gpu.memory) if fields.has("peak_bytes") else None
    fields.take("seconds")
    fields.take("peak_bytes")
    if seconds is None and peak is None:
        raise ConfigError(
            f"{fields.path}: {fields.place} has neither seconds nor peak_bytes; a row measures one of them"
        )
    fields.done()
    return Row(str(layout), recompute, schedule, microbatches, seconds, peak)


def _fitted(measured: Measurements, fields: Fields) -> Calibration:
    mark: Mark = fields.choice("mark", ("fitted", "scaled"))
    origin = fields.text("origin")
    matrix, heads = (Figure(fields.number(f"{each}_tflops", 0, _TFLOPS), mark, origin) for each in ("matrix", "head"))
    constant = fields.whole("constant_bytes", 0, _BYTES) if fields.has("constant_bytes") else None
    fields.take("constant_bytes")
    try:
        check_constant(measured, constant)
    except ConfigError as error:
        raise _placed(fields, error) from None
    errors = []
    for each in fields.objects("errors", _MOST_ROWS):
        values = [each.take(name) for name in ("seconds", "peak_bytes")]
        for name, value in zip(("seconds", "peak_bytes"), values, strict=True):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and abs(value) < 1e6):
                raise each.wrong(name, "a share as a number, or null")
        each.done()
        errors.append(Errors(*values))
    if len(errors) != len(measured.rows):
        raise fields.wrong("errors", f"one entry for each of the {len(measured.rows)} rows")
    warnings = fields.lines("warnings", _MOST_ROWS)
    fields.done()
    return Calibration(measured, rates_of(measured, matrix, heads), constant, tuple(errors), warnings)


def rates_of(measured: Measurements, matrix: Figure, heads: Figure) -> Rates:
    """Rates of measured runs. Without measured times of the attention core they are the shipped ones, in proportion to
    the peak in BF16."""
    core = measured.core
    if not core:
        core = shipped_calibration().rates_of(measured.gpu).core
    name, length = measured.name, measured.sequence_length
    return Rates(name, measured.gpu.name, measured.config, length, matrix, heads, core)
