"""Calibrations of single operators as JSON: every rate with its unit and the row that it is from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from undertow.config.errors import ConfigError
from undertow.config.gpus import GPUS, Gpu
from undertow.config.model import LayerKind, ModelConfig
from undertow.planner.calibration.fields import Fields
from undertow.planner.calibration.measured import Calibration, Measurements
from undertow.planner.geometry import build_geometry
from undertow.planner.memory.state import state_profile
from undertow.planner.timing.operators import EXPERTS, MOVERS, PRODUCTS, UPDATES, OperatorRates
from undertow.planner.timing.rates import Core, Figure, Mark, Rates

KIND = "operators"
"""The `kind` of such a file."""
FORMAT = 1

SHAPE = "v4-flash"
"""The preset whose widths the bench has on a GPU."""

_UNITS = {PRODUCTS: "operations a second", MOVERS: "bytes a second", UPDATES: "elements a second"}
_MOST = 5_000
LEAST, LARGEST = 1e6, 1e18
"""Between them lies every rate, a second."""
_SHORTEST = 1e-9  # milliseconds, and rows of an expert


def operators_document(calibration: Calibration) -> dict[str, Any]:
    """A calibration of operators as plain values: what `operators_of` takes."""
    measured, operators = calibration.measured, calibration.rates.operators
    assert operators is not None
    return {
        "format": FORMAT,
        "kind": KIND,
        "name": measured.name,
        "source": measured.source,
        "date": measured.date,
        "commit": measured.commit,
        "gpu": measured.gpu.name,
        "model": {"preset": measured.preset},
        "sequence_length": measured.sequence_length,
        "attention_core": {
            kind: {
                "operations": core.operations,
                "forward": _figure_document(core.forward, "milliseconds"),
                "backward": _figure_document(core.backward, "milliseconds"),
            }
            for kind, core in measured.core.items()
        },
        "rates": {name: _figure_document(figure, _unit(name)) for name, figure in operators.rates.items()},
        "experts": [
            {"rows": rows, **{name: _figure_document(figure, _unit("")) for name, figure in found.items()}}
            for rows, found in operators.experts.items()
        ],
        "unused": list(operators.unused),
        "warnings": list(calibration.warnings),
    }


def _unit(name: str) -> str:
    return next((unit for names, unit in _UNITS.items() if name in names), _UNITS[PRODUCTS])


def _figure_document(figure: Figure, unit: str) -> dict[str, Any]:
    return {"value": figure.value, "unit": unit, "mark": figure.mark, "source": figure.source}


def operators_of(fields: Fields, own: tuple[Gpu, ...] = ()) -> Calibration:
    """A calibration of operators as it was written. Raises `ConfigError` in a sentence that names the field."""
    if (kind := fields.take("kind")) != KIND:
        raise ConfigError(
            f"{fields.path}: its kind is {str(kind)[:60]!r}, and a calibration is of kind '{KIND}' or has none; make "
            "one of results of undertow bench kernels with --calibrate"
        )
    fields.whole("format", FORMAT, FORMAT)
    known = {gpu.name: gpu for gpu in (*GPUS, *own)}
    model = fields.object("model")
    preset = model.choice("preset", (SHAPE,))
    model.done()
    rates, cores = fields.object("rates"), fields.object("attention_core")
    needed = {name: _figure(rates.object(name), _unit(name)) for name in (*PRODUCTS, *MOVERS)}
    updates = {name: _figure(rates.object(name), _unit(name)) for name in UPDATES if rates.has(name)}
    rates.done()
    core = {kind: _core(cores.object(kind)) for kind in get_args(LayerKind)}
    cores.done()
    operators = OperatorRates(needed | updates, _experts(fields), fields.lines("unused", _MOST))
    measured = measurements_of(
        fields.text("name"), fields.text("source"), fields.text("date"), fields.text("commit"),
        known[fields.choice("gpu", list(known))], preset, fields.whole("sequence_length", 1, 2**31), core,
    )  # fmt: skip
    found = Calibration(measured, rates_of_operators(measured, operators), warnings=fields.lines("warnings", _MOST))
    fields.done()
    return found


def measurements_of(
    name: str,
    source: str,
    date: str,
    commit: str,
    gpu: Gpu,
    preset: str,
    sequence_length: int,
    core: Mapping[LayerKind, Core],
) -> Measurements:
    """Measurements without runs: one GPU, which sends nothing. Implementation and state are Undertow's own, but no plan
    takes them from here."""
    return Measurements(
        name=name, source=source, date=date, commit=commit, gpu=gpu, config=ModelConfig.from_preset(preset),
        preset=preset, frozen_indexer=False, sequence_length=sequence_length, micro_batch=1,
        geometry=build_geometry(1), implementation="reference", profile=state_profile("adamw-bf16"), rows=(), core=core,
    )  # fmt: skip


def rates_of_operators(measured: Measurements, operators: OperatorRates) -> Rates:
    """Rates as the rest of the planner reads them: those of one large product and of the loss, in TFLOP/s."""
    dense, loss = (operators.rates[name].in_units_of(1e12) for name in PRODUCTS[:2])
    return Rates(
        measured.name, measured.gpu.name, measured.config, measured.sequence_length, dense, loss, measured.core,
        operators,
    )  # fmt: skip


def _core(fields: Fields) -> Core:
    operations = fields.number("operations", LEAST, LARGEST)
    forward, backward = (_figure(fields.object(way), "milliseconds") for way in ("forward", "backward"))
    fields.done()
    return Core(forward, backward, operations)


def _experts(fields: Fields) -> dict[float, dict[str, Figure]]:
    if fields.take("experts") == []:
        return {}
    found = {}
    for each in fields.objects("experts", _MOST):
        rows = each.number("rows", _SHORTEST, LARGEST)
        found[rows] = {name: _figure(each.object(name), _unit("")) for name in EXPERTS}
        each.done()
    return found


def _figure(fields: Fields, unit: str) -> Figure:
    value = fields.number("value", _SHORTEST if unit == "milliseconds" else LEAST, LARGEST)
    fields.choice("unit", (unit,))
    mark: Mark = fields.choice("mark", get_args(Mark))
    found = Figure(value, mark, fields.text("source"))
    fields.done()
    return found
