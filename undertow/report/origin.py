"""Where a run comes from: what its directory says of recipe, data, machine, commit, dates and resumptions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from undertow.config.document import read_document
from undertow.config.errors import InputError
from undertow.config.layer import SECTION, Entry
from undertow.config.scalars import shown
from undertow.report.page import Row
from undertow.train.progress import duration
from undertow.train.run import CONFIG, ENVIRONMENT, EVENTS

_SOURCE = re.compile(r"  # (?P<source>[^#]+)$")
_FILE = re.compile(r"(?P<file>.+\.ya?ml):\d+")
_BEGINS = ("started", "resumed")
_KEYS = {
    "weights from": "init_from",
    "data": "data.corpus",
    "tokenizer": "data.tokenizer",
    "optimizer": "train.optimizer",
    "type of the weights": "numerics.dtype",
    "seed": "seed",
}

Event = tuple[float, str]


def origin(run: Path, metrics: Sequence[Mapping[str, Any]]) -> list[Row]:
    """What the files beside the metrics of the directory `run` tell; a file that is not there tells nothing.

    Raises `ConfigError` or `InputError` for one that cannot be read.
    """
    return [*_configured(run / CONFIG), *_machine(run / ENVIRONMENT), *_times(run / EVENTS, metrics)]


def _configured(path: Path) -> Iterator[Row]:
    if not path.is_file():
        return
    entries = {key: entry for key, entry in read_document(path, {}).items() if entry.value is not SECTION}
    values = {key: entry.value for key, entry in entries.items()}
    files, given = _sources(entries, path.read_text(encoding="utf-8").splitlines())
    if files:
        yield Row("recipe", ", ".join(files), f"Set outside of it: {', '.join(given)}." if given else "")
    if "model.num_hidden_layers" in values:
        shape = f"{values['model.num_hidden_layers']} layers of width {values.get('model.hidden_size')}"
        preset = values.get("model.preset")
        yield Row("model", f"{preset}: {shape}" if preset else shape)
    for name, key in _KEYS.items():
        if values.get(key) is not None:
            yield Row(name, str(values[key]))


def _sources(entries: Mapping[str, Entry], lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """From the comments behind the values: recipe files, and what the command line or the environment set."""
    files, given = dict[str, None](), []
    for key, entry in entries.items():
        found = _SOURCE.search(lines[int(entry.source.rpartition(":")[2]) - 1])
        source = found["source"].strip() if found else ""
        if place := _FILE.fullmatch(source):
            files[place["file"]] = None
        elif source.startswith(("command line", "environment ")):
            given.append(f"{key}={shown(entry.value)}")
    return list(files), given


def _machine(path: Path) -> Iterator[Row]:
    if not path.is_file():
        return
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        device, versions = str(known["device"]), dict(known.get("versions", {}))
        kind = device.partition(":")[0]
        names = [each["name"] for each in known.get("devices", []) if each["device"].partition(":")[0] == kind]
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        raise InputError(f"{path}: damaged: the JSON object of a run is expected; remove the file") from None
    yield Row("device", ", ".join([device, *names[:1]]))
    told = [f"{name} {versions[name]}" for name in ("undertow", "torch", "python") if name in versions]
    if told:
        yield Row("versions", ", ".join(told))
    if known.get("commit"):
        yield Row("commit", str(known["commit"]))


def _times(path: Path, metrics: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    events = list(_events(path)) if path.is_file() else []
    if not events:
        return
    begins = [when for when, what in events if what.startswith(_BEGINS)] or [events[0][0]]
    seen = [when for when, _ in events] + [entry["time"] for entry in metrics if entry.get("time") is not None]
    parts = zip(begins, [*begins[1:], math.inf], strict=True)
    at_work = sum(
        max((when for when in seen if begin <= when < after), default=begin) - begin for begin, after in parts
    )
    yield Row("begun", _date(events[0][0]))
    yield Row("last event", f"{_date(events[-1][0])}: {events[-1][1]}")
    yield Row("resumptions", str(sum(what.startswith("resumed") for _, what in events)))
    yield Row("wall time", duration(at_work), "From each start to the last sign of life after it; pauses do not count.")


def _events(path: Path) -> Iterator[Event]:
    """Times in seconds since 1970; a line that a full disk cut short is passed over."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        when, _, what = line.partition("  ")
        try:
            yield datetime.fromisoformat(when).timestamp(), what
        except ValueError:
            continue


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
