"""A calibration from results of `undertow bench kernels`: rates of single operators, measured on one GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, get_args

from undertow.config.errors import ConfigError
from undertow.config.gpus import Gpu, find_gpu
from undertow.config.model import LayerKind
from undertow.planner.calibration.fields import Fields
from undertow.planner.calibration.file import shipped_calibration
from undertow.planner.calibration.measured import Calibration
from undertow.planner.calibration.operators_file import LARGEST, LEAST, SHAPE, measurements_of, rates_of_operators
from undertow.planner.timing.operators import COPY, DENSE, EXPERTS, MOVERS, PRODUCTS, UPDATES, OperatorRates
from undertow.planner.timing.rates import Core, Figure, Mark

BENCH = "kernels"
"""The `kind` of a result of `undertow bench kernels`."""
OWN_WAYS: tuple[str, ...] = ("triton", "reference")
"""Backends of the registry, best first; other ways are peers, which training does not take."""
_MOST_ROWS = 2_000
_LONGEST = 500
_LENGTH = 4096
_EXPERTS = re.compile(r"(\d{1,12}) rows of (\d{1,12}) experts, ")
_UPDATED = re.compile(r"(\d{1,12}) (?:elements|experts of (\d{1,12}) x (\d{1,12}) x (\d{1,12}))")
_TOKENS = re.compile(r"([1-9]\d{0,8}) tokens, ")
_CACHED = 10  # times the bandwidth of the memory that nothing moves by, the cache included


class _Row(NamedTuple):
    """What a row measured: the operator on a shape by one of our backends."""

    file: str
    op: str
    shape: str
    way: str
    ms: float
    bytes: float
    operations: float

    def __str__(self) -> str:
        return f"{self.file}: {self.op}, {self.shape}, {self.way}, {self.ms:.4g} ms"[:_LONGEST]


@dataclass(frozen=True)
class _Bench:
    """One result file: its GPU, ceilings in bytes and operations a second, and the rows that count."""

    name: str
    gpu: Gpu
    date: str
    commit: str
    ceilings: dict[str, float]
    rows: tuple[_Row, ...]
    remarks: tuple[str, ...]


def operator_calibration(benches: Sequence[Fields], own: tuple[Gpu, ...] = ()) -> Calibration:
    """The calibration of one or several result files of one GPU; of two rows for one operator and shape the later
    file's counts. Raises `ConfigError` for a file that cannot be used.

    What has no row keeps a rate all the same, and `warnings` say which: products and copies that of the ceilings of the
    files, the attention core the shipped one.
    """
    read = [_bench(each, own) for each in benches]
    gpu = read[0].gpu
    for bench in read[1:]:
        if bench.gpu != gpu:
            raise ConfigError(
                f"{bench.name}: measured on {bench.gpu.name}, {read[0].name} on {gpu.name}; a calibration is of one GPU"
            )
    rows = {(row.op, row.shape): row for bench in read for row in bench.rows}
    ceilings = {name: max((bench.ceilings[name], bench.name) for bench in read) for name in (COPY, DENSE)}
    core, length, used = _cores(rows, gpu)
    operators, taken = _rates(rows, ceilings)
    _refuse_impossible(core, operators, gpu)
    warnings = [remark for bench in read for remark in bench.remarks]
    warnings += _unmeasured(core, operators)
    operators = replace(operators, unused=_unused(rows, used | taken))
    name = "+".join(dict.fromkeys(Path(bench.name).stem for bench in read))
    dates, commits = (" ".join(dict.fromkeys(found)) for found in zip(*((b.date, b.commit) for b in read), strict=True))
    source = f"undertow bench kernels: {', '.join(bench.name for bench in read)}"
    measured = measurements_of(
        name[:_LONGEST], source[:_LONGEST], dates[:_LONGEST], commits[:_LONGEST], gpu, SHAPE, length, core
    )
    return Calibration(measured, rates_of_operators(measured, operators), warnings=tuple(warnings))


def _bench(fields: Fields, own: tuple[Gpu, ...]) -> _Bench:
    name, environment = _printable(fields.path.name), fields.object("environment")
    if not environment.has("gpu"):
        raise ConfigError(f"{fields.path}: measured on a CPU; a calibration is of a GPU, so run the bench on one")
    if fields.take("device") == "cpu":  # --device cpu beside a GPU
        raise ConfigError(
            f"{fields.path}: measured with --device cpu; a calibration is of a GPU, so run the bench on one"
        )
    device = environment.text("gpu")
    words = device.upper().replace("-", " ").split()
    gpu = next((each for each in own if each.name.upper() in words), None) or find_gpu(device)
    if gpu is None:
        raise ConfigError(
            f"{fields.path}: measured on {device}, which is no GPU of the catalogue; measure on one of its GPUs, or "
            "describe yours in a --gpu-file by a name that is a word of this one"
        )
    given = fields.object("ceilings")
    ceilings = {each: given.number(each, 0, LARGEST) for each in (COPY, DENSE)}
    rows = tuple(row for each in fields.objects("rows", _MOST_ROWS) if (row := _row(name, each)))
    best: dict[tuple[str, str], _Row] = {}
    for row in sorted(rows, key=lambda row: OWN_WAYS.index(row.way)):
        best.setdefault((row.op, row.shape), row)
    remarks = [
        f"{row.op}, {row.shape}: no kernel was measured, the row is the reference's"
        for row in best.values()
        if row.way == "reference"
    ]
    if fields.flag("deterministic", False):
        remarks.append(f"{name} was measured with deterministic results, which may take longer")
    return _Bench(
        name, gpu, environment.text("date", "unknown"), environment.text("commit", "unknown"), ceilings,
        tuple(best.values()), tuple(remarks),
    )  # fmt: skip


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _row(file: str, fields: Fields) -> _Row | None:
    """A row that was measured and found right, by a way that training takes."""
    status, way = fields.text("status"), fields.text("way")
    if status != "ok" or way not in OWN_WAYS:
        return None
    return _Row(
        file, fields.text("op"), fields.text("shape"), way, fields.object("ms").number("median", 0, 1e7),
        fields.number("bytes", 0, 1e15, 0.0), fields.number("flops_exact", 0, 1e18, 0.0),
    )  # fmt: skip


_Rows = dict[tuple[str, str], _Row]


def _cores(rows: _Rows, gpu: Gpu) -> tuple[dict[LayerKind, Core], int, set[_Row]]:
    """Attention of every kind of layer, the length in tokens, and the rows behind them: of the lengths at which all
    kinds that have rows were measured, the one nearest to 4,096. Other kinds keep the shipped core."""
    found: dict[LayerKind, dict[int, tuple[_Row, _Row]]] = {}
    for kind in get_args(LayerKind):
        for (op, shape), forward in rows.items():
            backward, tokens = rows.get((f"{kind} backward", shape)), _TOKENS.match(shape)
            timed = op == f"{kind} forward" and forward.operations
            if timed and backward and tokens:  # packed documents have no single length
                found.setdefault(kind, {})[int(tokens[1])] = forward, backward
    shared = set.intersection(*map(set, found.values())) if found else set()
    if found and not shared:
        raise ConfigError(
            f"attention of {', '.join(found)} layers was measured at no common length; measure all of them at one, "
            "as with --shape 4096"
        )
    length = min(shared, key=lambda tokens: (abs(tokens - _LENGTH), tokens), default=_LENGTH)
    shipped, used = shipped_calibration(), set[_Row]()
    rates = shipped.rates.scaled(gpu.name, gpu.bf16 / shipped.measured.gpu.bf16)  # so marked on its own GPU too
    core = dict(rates.core)
    for kind, lengths in found.items():
        pair = lengths[length]
        ahead, back = (Figure(row.ms, "measured", str(row)) for row in pair)
        core[kind] = Core(ahead, back, pair[0].operations)
        used |= set(pair)
    return core, length, used


def _rates(rows: _Rows, ceilings: dict[str, tuple[float, str]]) -> tuple[OperatorRates, set[_Row]]:
    """Rates of all operators but attention, and the rows behind them."""
    by_name: dict[str, list[_Row]] = {}
    for row in rows.values():
        by_name.setdefault(row.op, []).append(row)
    rates, taken = {}, set[_Row]()
    for name in (*PRODUCTS, *MOVERS):
        moves = name in MOVERS
        ceiling, file = ceilings[COPY if moves else DENSE]
        what = f"{file}: ceilings.{COPY if moves else DENSE}"
        mark: Mark = "measured" if name in (COPY, DENSE) else "ceiling"
        rates[name] = Figure(ceiling, mark, what)
        if measured := [row for row in by_name.get(name, ()) if (row.bytes if moves else row.operations)]:
            row = max(measured, key=lambda row: row.bytes)  # the largest shape: there launches weigh least
            taken.add(row)
            rates[name] = Figure((row.bytes if moves else row.operations) / row.ms * 1e3, "measured", str(row))
    for name in UPDATES:
        for row in by_name.get(name, ()):
            if size := _UPDATED.match(row.shape):
                elements = float(size[1]) * (float(size[2]) * float(size[3]) * float(size[4]) if size[2] else 1.0)
                rates[name] = Figure(elements / row.ms * 1e3, "measured", str(row))
                taken.add(row)
    experts = dict(_experts(rows))
    taken |= {row for found in experts.values() for pair in found.values() for row in pair}
    figures = {per: {way: _together(pair) for way, pair in found.items()} for per, found in experts.items()}
    return OperatorRates(rates, figures), taken


def _refuse_impossible(core: dict[LayerKind, Core], operators: OperatorRates, gpu: Gpu) -> None:
    """Refuse rates that the GPU cannot have, and what is nearly none: a damaged file, or one of another GPU."""
    most = {**dict.fromkeys(PRODUCTS, gpu.bf16), **dict.fromkeys(MOVERS, _CACHED * gpu.bandwidth)}
    found = [(figure, figure.value, most.get(name, LARGEST)) for name, figure in operators.rates.items()]
    found += [(figure, figure.value, gpu.bf16) for each in operators.experts.values() for figure in each.values()]
    for each in core.values():
        found += [(way, each.operations / way.value * 1e3, gpu.bf16) for way in (each.forward, each.backward)]
    for figure, rate, limit in found:
        if not LEAST <= rate <= limit:
            raise ConfigError(
                f"{figure.source}: that is {rate:.3g} a second, and {gpu.name} does {LEAST:g} to {limit:.3g}; measure "
                "it again, on the GPU that the file names"
            )


def _experts(rows: _Rows) -> Iterator[tuple[float, dict[str, tuple[_Row, _Row]]]]:
    """Rows of both products of an expert in all three ways, by the rows that an expert gets."""
    found: dict[float, dict[str, _Row]] = {}
    for row in rows.values():
        shape = _EXPERTS.match(row.shape) if row.op.startswith(("fc1 ", "fc2 ")) else None
        if shape and row.operations and float(shape[2]):
            found.setdefault(float(shape[1]) / float(shape[2]), {})[row.op] = row
    for per, ops in sorted(found.items(), reverse=True):
        if per and all(f"{product} {way}" in ops for product in ("fc1", "fc2") for way in EXPERTS):
            yield per, {way: (ops[f"fc1 {way}"], ops[f"fc2 {way}"]) for way in EXPERTS}


def _together(pair: tuple[_Row, _Row]) -> Figure:
    rate = sum(row.operations for row in pair) / sum(row.ms for row in pair) * 1e3
    return Figure(rate, "measured", "; ".join(map(str, pair))[:_LONGEST])


def _unmeasured(core: dict[LayerKind, Core], operators: OperatorRates) -> Iterator[str]:
    """What has a rate without a row, and what has none."""
    rates = operators.rates
    yield "dense products have no rows of their own: at the rate of one large product"
    if shipped := sorted(kind for kind, each in core.items() if each.forward.mark != "measured"):
        yield f"attention of {', '.join(shipped)} has no row: it keeps the shipped times, in proportion to the peak"
    for limit, names in (("one large product", PRODUCTS), ("a large copy", MOVERS)):
        missing = [name for name in names if rates[name].mark == "ceiling"]
        if missing:
            yield f"no row of {', '.join(missing)}: at the rate of {limit}, which is quicker than they are"
    if not operators.experts:
        yield "no rows of experts (fc1, fc2): at the rate of one large product, which is quicker than they are"
    if missing := [name for name in UPDATES if name not in rates]:
        yield f"no row of {', '.join(missing)}: a step of the optimizer with such state is not counted"


def _unused(rows: _Rows, used: set[_Row]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(row) for row in rows.values() if row not in used))
