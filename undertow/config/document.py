"""One YAML file read with positions, so that every value knows its line: a recipe, or a list of GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.constructor import ConstructorError, DuplicateKeyError, RoundTripConstructor
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.reader import ReaderError

from undertow.config.errors import ConfigError
from undertow.config.interpolate import interpolate
from undertow.config.layer import SECTION, Entry, Layer, Rank, put
from undertow.config.reading import read_regular
from undertow.config.scalars import plain

_LARGEST_FILE = 1 << 20


def place(path: Path) -> str:
    """A path as a person would write it: relative to the working directory where it lies inside, else whole."""
    working = Path.cwd()
    path = Path(os.path.abspath(path))
    return str(path.relative_to(working) if path.is_relative_to(working) else path)


def is_file(path: Path) -> bool:
    """Whether a file lies there; False also for a path that no file can have (too long, a NUL in it)."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_document(path: Path, environment: Mapping[str, str], what: str = "recipe") -> Layer:
    """The keys of one file with their lines, variables substituted; `extends` is among them, not yet followed.

    `what` the file is called in messages.

    Raises `ConfigError`, naming file and line, for a file that cannot be read, is not YAML, repeats a key, is not a
    mapping at the top, or holds a value that no key takes (a date, a tagged scalar).
    """
    name = place(path)
    try:
        text = _lines(read_regular(path, _LARGEST_FILE).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{name}: cannot read this {what}: {reason}") from None
    try:
        return _read(text, name, environment, what)
    except DuplicateKeyError as error:
        repeated = str(error.problem).replace("found duplicate", "repeated")
        raise ConfigError(f"{_line_of(name, error)}: {repeated}") from None
    except MarkedYAMLError as error:
        raise ConfigError(f"{_line_of(name, error)}: not valid YAML: {_reason(error)}") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line}: not valid YAML: character {error.character!r} is not allowed") from None
    except RecursionError:
        raise ConfigError(f"{name}: not a {what}: its brackets or mappings are nested too deeply to read") from None


def _lines(text: str) -> str:
    """Lines end as in a file that is opened as text."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


class _Constructor(RoundTripConstructor):
    """The library's constructor, whose failures on impossible scalars (the date 2001-99-99) name their line."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """The value of a node. Raises `ConstructorError` for one that looks like a number or date and is none."""
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, OverflowError, LookupError, TypeError, AttributeError):
            problem = "this value looks like a number, a date or a tag and is none; quote it if text was meant"
            raise ConstructorError(None, None, problem, node.start_mark) from None


def _read(text: str, name: str, environment: Mapping[str, str], what: str) -> Layer:
    reader = YAML(typ="rt", pure=True)
    reader.Constructor = _Constructor
    tree = reader.load(text)
    if not isinstance(tree, CommentedMap):
        given = "nothing" if tree is None else f"a {'list' if isinstance(tree, list) else 'single value'}"
        raise ConfigError(f"{name}:1: a {what} is a mapping of keys, but this file holds {given}")
    layer: Layer = {}
    _collect(tree, name, environment, "", layer)
    return layer


def _reason(error: MarkedYAMLError) -> str:
    return ", ".join(part for part in (error.context, error.problem) if part)


def _line_of(name: str, error: MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f"{name}:{mark.line + 1}" if mark else name


def _collect(tree: CommentedMap, name: str, environment: Mapping[str, str], prefix: str, layer: Layer) -> None:
    for part, value in tree.items():
        position = (tree.lc.data or {}).get(part) or (tree.lc.line,)
        source = f"{name}:{position[0] + 1}"
        plain(part, f"{source}: a key")
        if not isinstance(part, str) or "." in part:
            mend = "nest it below its section, for no name has a dot" if isinstance(part, str) else "keys are text"
            raise ConfigError(f"{source}: key '{part}' cannot stand here: {mend}")
        key = f"{prefix}{part}"
        if isinstance(value, CommentedMap):
            put(layer, key, Entry(SECTION, source, Rank.FILE))
            _collect(value, name, environment, f"{key}.", layer)
        else:
            put(layer, key, interpolate(plain(value, f"{source}: {key}"), source, environment))
