"""Clusters as people write them: `32xMI355X`, or several pools as `16xMI308X+8xMI308X`; GPUs of one's own by YAML."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from undertow.config.document import read_document
from undertow.config.errors import ConfigError
from undertow.config.gpus import GPUS, Dialect, Gpu, Source
from undertow.config.layer import SECTION, Entry
from undertow.config.presets import nearest
from undertow.config.scalars import told

LARGEST_POOL, LEAST_MEMORY = 1_000_000, 10**9
_NEEDED: tuple[str, ...] = ("memory", "bandwidth", "bf16", "fp8", "link")
_OPTIONAL: Mapping[str, Any] = {
    "arch": "unknown", "compute_units": 0, "lds": 0, "dialect": "ocp", "fp4": 0, "domain": 8,
}  # fmt: skip
_DIGITS = 30  # of a number of GPUs that is read at all
_POOL = re.compile(r"(?:(\d+)\s*[xX]\s*)?([A-Za-z][\w-]*)")


class Pool(NamedTuple):
    """GPUs of one model that work together."""

    count: int
    gpu: Gpu

    def __str__(self) -> str:
        return f"{self.count}x{self.gpu.name}"


def parse_cluster(text: str, own: Sequence[Gpu] = ()) -> tuple[Pool, ...]:
    """The pools of `NxGPU` or `NxGPU+NxGPU`, in the order written; a name alone is one GPU, upper or lower case.

    `own` are GPUs beside the catalogue's, and go before them. Raises `ConfigError` for another form, a count out of
    bounds, and an unknown GPU, with the nearest name.
    """
    known = {gpu.name.lower(): gpu for gpu in (*GPUS, *own)}
    said, pools = f"gpus {told(text)}", []
    for part in text.split("+"):
        match = _POOL.fullmatch(part.strip())
        if not match:
            raise ConfigError(f"{said}: {told(part.strip())} is not a pool; write NxGPU, as 32xMI355X or 8xH200+4xH200")
        digits, name = match[1] or "1", match[2]
        count = int(digits) if len(digits) <= _DIGITS else LARGEST_POOL + 1
        if not 1 <= count <= LARGEST_POOL:
            given = digits if len(digits) <= _DIGITS else f"{digits[:_DIGITS]}..."
            raise ConfigError(f"{said}: a pool of {given} GPUs; allowed: 1 to {LARGEST_POOL}")
        gpu = known.get(name.lower())
        if gpu is None:
            near = nearest(name.upper(), [each.name for each in known.values()])
            names = ", ".join(each.name for each in known.values())
            raise ConfigError(f"{said}: unknown GPU {told(name)}{near} (known: {names}; others from a YAML file)")
        pools.append(Pool(count, gpu))
    return tuple(pools)


def read_gpus(path: Path, environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """GPUs described in a YAML file, as a mapping from name to figures in the units of `Gpu`.

    `memory` (bytes, 10^9 at least), `bandwidth`, `bf16`, `fp8` and `link` are needed, `arch`, `compute_units`, `lds`,
    `dialect`, `fp4` and `domain` may be left out; `source` says where the figures are from (default `unknown`). Raises
    `ConfigError` with file and line.
    """
    described: dict[str, dict[str, Entry]] = {}
    for key, entry in read_document(path, environment, "GPU file").items():
        name, _, figure = key.partition(".")
        if entry.value is SECTION and not figure:
            described[name] = {"": entry}
        elif name in described:
            described[name][figure] = entry
        else:
            raise ConfigError(f"{entry.source}: GPU '{name}' is {entry.told()}; allowed: a mapping of its figures")
    return tuple(_gpu(name, figures) for name, figures in described.items())


def _gpu(name: str, figures: Mapping[str, Entry]) -> Gpu:
    place = figures[""].source
    if not _POOL.fullmatch(name) or re.match(r"\d", name):
        raise ConfigError(f"{place}: GPU name '{name}'; allowed: a letter, then letters, digits, '-' or '_'")
    allowed = (*_NEEDED, *_OPTIONAL, "source")
    for figure, entry in figures.items():
        if figure and figure not in allowed:
            near = nearest(figure, list(allowed))
            raise ConfigError(
                f"{entry.source}: GPU {name}: unknown figure '{figure}'{near} (allowed: {', '.join(allowed)})"
            )
    missing = [figure for figure in _NEEDED if figure not in figures]
    if missing:
        raise ConfigError(f"{place}: GPU {name} lacks {', '.join(missing)}; see undertow.config.gpus for the units")
    values = dict(_OPTIONAL) | {figure: _figure(name, figure, entry) for figure, entry in figures.items() if figure}
    source = values.pop("source", "unknown")
    left_out: dict[str, Source] = {figure: "unknown" for figure in _OPTIONAL if figure not in figures}
    given: dict[str, Source] = {figure: source for figure in figures if figure not in ("", "source")}
    return Gpu(name=name, **values, sources=given | left_out)


def _figure(name: str, figure: str, entry: Entry) -> Any:
    value = entry.value
    choices = {"dialect": get_args(Dialect), "source": get_args(Source)}.get(figure)
    if choices or figure == "arch":
        good, allowed = isinstance(value, str) and value in (choices or (value,)), ", ".join(choices or ("text",))
    else:
        least = 0 if figure in _OPTIONAL else LEAST_MEMORY if figure == "memory" else 1
        good = isinstance(value, int | float) and not isinstance(value, bool) and least <= value < 1e30
        allowed = f"a number from {least}" if figure != "memory" else "bytes from 1e9 (288 GB are 288e9)"
    if not good:
        raise ConfigError(f"{entry.source}: GPU {name}: {figure} is {entry.told()}; allowed: {allowed}")
    whole = {field.name for field in dataclasses.fields(Gpu) if field.type == "int"}
    return int(value) if figure in whole else float(value) if not isinstance(value, str) else value
