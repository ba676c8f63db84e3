"""The chain of recipe files that `extends:` names, from the most general to the recipe itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from undertow.config.document import is_file, place, read_document
from undertow.config.errors import ConfigError
from undertow.config.layer import Layer
from undertow.config.paths import shipped_recipe
from undertow.config.scalars import told

_LONGEST = 32


def read_chain(path: Path, environment: Mapping[str, str]) -> list[Layer]:
    """One layer per file, parents before children and in the order named, to be merged so that the later wins.

    `extends` holds one path or a list of them, relative to the file that names them, or names of shipped recipes where
    no such file is. A file reached twice counts once,
    where it was reached first, so that a common ancestor never undoes what one of two parents changed. Raises
    `ConfigError`, naming the child's file and line, for a missing parent or a cycle.
    """
    layers: dict[Path, Layer] = {}
    _read(path.resolve(), environment, (), layers)
    return list(layers.values())


def _read(path: Path, environment: Mapping[str, str], children: tuple[Path, ...], layers: dict[Path, Layer]) -> None:
    layer = read_document(path, environment)
    entry = layer.pop("extends", None)
    if entry is not None:
        if len(children) >= _LONGEST:
            raise ConfigError(f"{entry.source}: the chain of extends is too long; allowed: {_LONGEST} files in a row")
        parents = entry.value if isinstance(entry.value, list) else [entry.value]
        if not all(isinstance(parent, str) and parent for parent in parents):
            raise ConfigError(f"{entry.source}: extends is {entry.told()}; allowed: a path or a list of paths")
        for parent in parents:
            try:
                target = (path.parent / parent).resolve()
            except (OSError, ValueError):
                raise ConfigError(
                    f"{entry.source}: extends {told(parent)} is not a path that a file can have"
                ) from None
            if not is_file(target):
                target = shipped_recipe(parent) or target
            if target in (*children, path):
                loop = " -> ".join(place(file) for file in (*children, path, target))
                raise ConfigError(f"{entry.source}: extends goes in a circle: {loop}")
            if not is_file(target):
                lacking = told(place(target)).strip("'")
                raise ConfigError(f"{entry.source}: extends {told(parent)}, but there is no file {lacking}")
            if target not in layers:
                _read(target, environment, (*children, path), layers)
    layers[path] = layer
