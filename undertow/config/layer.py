"""Layers of a configuration: flat mappings from dotted key to value and source, and the rule by which they merge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from undertow.config.scalars import told


class Rank(IntEnum):
    """What beats what, whatever the order of reading; within a rank the later value wins."""

    PRESET = 0
    FILE = 1
    SWITCH = 2  # an optimisation family switched by the environment or the command line
    ENVIRONMENT = 3
    COMMAND_LINE = 4


SECTION: Final = object()
"""The value of a key that holds other keys."""


@dataclass(frozen=True)
class Entry:
    """One value with the place it came from, such as `recipes/pretrain/quickstart.yaml:12` or `command line`."""

    value: Any
    source: str
    rank: Rank

    def told(self) -> str:
        """The value as a message tells it."""
        return told({} if self.value is SECTION else self.value)


Layer = dict[str, Entry]


def put(layer: Layer, key: str, entry: Entry) -> None:
    """Set a dotted key, marking the sections above it. `model: NAME` is short for `model: {preset: NAME}`."""
    if key == "model" and isinstance(entry.value, str):
        key = "model.preset"
    parts = key.split(".")
    for depth in range(1, len(parts)):
        above = ".".join(parts[:depth])
        if above not in layer or layer[above].value is not SECTION:
            layer[above] = Entry(SECTION, entry.source, entry.rank)
    if entry.value is not SECTION:
        _drop_below(layer, key)
    layer[key] = entry


def _drop_below(layer: Layer, key: str) -> None:
    for below in [other for other in layer if other.startswith(f"{key}.")]:
        del layer[below]


def merge(layers: Iterable[Layer]) -> Layer:
    """Deep merge: sections join; the later of two other values, lists too, wins unless the earlier ranks higher."""
    merged: Layer = {}
    for layer in layers:
        for key, entry in layer.items():
            if entry.value is not SECTION:
                if key in merged and merged[key].rank > entry.rank:
                    continue
                _drop_below(merged, key)
            merged[key] = entry
    return merged


def nested(layer: Layer) -> dict[str, Any]:
    """The layer as nested dictionaries of plain values."""
    tree: dict[str, Any] = {}
    for key, entry in layer.items():
        *above, name = key.split(".")
        section = tree
        for part in above:
            section = section.setdefault(part, {})
        if entry.value is SECTION:
            section.setdefault(name, {})
        else:
            section[name] = entry.value
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as dotted keys; an empty mapping and a list are values."""
    keys: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            keys |= flat(value, f"{prefix}{name}.")
        else:
            keys[f"{prefix}{name}"] = value
    return keys
