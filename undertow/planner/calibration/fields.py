"""Typed fields of an untrusted JSON object: each is read once, and a wrong one is told in a sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from undertow.config.errors import ConfigError
from undertow.config.presets import nearest
from undertow.config.reading import read_regular

_LARGEST_FILE = 1 << 20
_LONGEST = 500


class Fields:
    """An object of a file, whose fields are taken one by one; `done` refuses what was not taken."""

    def __init__(self, path: Path, values: Any, place: str = "") -> None:
        self.path, self.place = path, place
        if not isinstance(values, Mapping):
            raise ConfigError(f"{path}: {place or 'the file'} is {_told(values)}; allowed: an object with named fields")
        self._values, self._taken = values, set[str]()

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(key) is not None

    def take(self, key: str) -> Any:
        """The raw value; None where it is left out."""
        self._taken.add(key)
        return self._values.get(key)

    def wrong(self, key: str, allowed: str) -> ConfigError:
        """The refusal of a field."""
        what = _told(self._values[key]) if key in self._values else "missing"
        return ConfigError(f"{self.path}: {self._name(key)} is {what}; allowed: {allowed}")

    def text(self, key: str, default: str | None = None) -> str:
        """One line of text that is not empty."""
        value = self.take(key)
        if value is None and default is not None:
            return default
        if not (isinstance(value, str) and value.strip() and len(value) <= _LONGEST and value.isprintable()):
            raise self.wrong(key, f"a line of text, {_LONGEST} characters at most")
        return value

    def choice(self, key: str, allowed: Sequence[str], default: str | None = None) -> Any:
        """One of several words."""
        value = self.text(key, default)
        if value not in allowed:
            raise self.wrong(key, ", ".join(allowed) + nearest(value, list(allowed)))
        return value

    def whole(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number."""
        value = self.take(key)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low:,} to {high:,}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A number above `low`, or at least 0 where `low` is 0 and there is a default."""
        value = self.take(key)
        if value is None and default is not None:
            return default
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not (low < value <= high or (default is not None and value == low))
        ):
            raise self.wrong(key, f"a number {'from' if default is not None else 'above'} {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.take(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def object(self, key: str) -> Fields:
        """Fields of an object within."""
        value = self.take(key)
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object with named fields")
        return Fields(self.path, value, self._name(key))

    def objects(self, key: str, most: int) -> list[Fields]:
        """The objects of a list, one at least."""
        value = self.take(key)
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            raise self.wrong(key, f"a list of 1 to {most:,} objects")
        return [Fields(self.path, each, f"{self._name(key)}[{n}]") for n, each in enumerate(value)]

    def lines(self, key: str, most: int) -> tuple[str, ...]:
        """A list of lines of text."""
        value = self.take(key)
        if not isinstance(value, list) or len(value) > most or not all(isinstance(line, str) for line in value):
            raise self.wrong(key, f"a list of at most {most:,} lines of text")
        return tuple(value)

    def rest(self) -> dict[str, Any]:
        """All fields that were not taken yet."""
        left = {key: self.take(key) for key in self._values if key not in self._taken}
        return left

    def done(self) -> None:
        """Raises `ConfigError` for a field that nobody asked for."""
        for key in self._values:
            if key not in self._taken:
                near = nearest(str(key), sorted(self._taken))
                raise ConfigError(
                    f"{self.path}: {self._name(key)} is no field of a calibration{near} (fields here: "
                    f"{', '.join(sorted(self._taken))})"
                )

    def _name(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key


def read_fields(path: Path) -> Fields:
    """The object of a JSON file. Raises `ConfigError` for a file that cannot be read, is too large, or is no JSON."""
    try:
        content = read_regular(path, _LARGEST_FILE)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a JSON file of measurements") from None
    try:
        values = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; measurements are JSON in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: no JSON, {error.msg}") from None
    except (ValueError, RecursionError) as error:
        told = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path}: no JSON of measurements, {told}") from None
    return Fields(path, values)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number that can be measured")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"field {twice!r} stands there twice")
    return found


def _told(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, Mapping | list) else "an object" if value else "empty"
    if isinstance(value, list):
        text = f"a list of {len(value)}"
    return text if len(text) <= 80 else f"{text[:77]}..."
