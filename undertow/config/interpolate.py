"""`${NAME}` and `${NAME:default}` in recipe values, read from an environment that the caller passes in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from undertow.config.errors import ConfigError
from undertow.config.layer import Entry, Rank
from undertow.config.scalars import plain, typed

_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_]\w*)(?::(?P<default>[^}]*))?\}")


def interpolate(value: Any, source: str, environment: Mapping[str, str]) -> Entry:
    """Substitute the variables of a text, or of the texts in a list; `$${` stands for a literal `${`.

    A value that is one variable and nothing else is typed after substitution; inside a longer text it stays text. A
    value in which a set variable took part has the environment as its source and rank. Raises `ConfigError`, naming
    variable and place, for one that is unset without a default, and for a malformed `${`.
    """
    if not isinstance(value, (str, list)):
        return Entry(value, source, Rank.FILE)
    used: list[str] = []
    result = _substitute(value, source, environment, used)
    if not used:
        return Entry(result, source, Rank.FILE)
    return Entry(result, f"environment {', '.join(dict.fromkeys(used))} ({source})", Rank.ENVIRONMENT)


def _substitute(value: Any, source: str, environment: Mapping[str, str], used: list[str]) -> Any:
    if isinstance(value, list):
        return [_substitute(item, source, environment, used) for item in value]
    if not isinstance(value, str):
        return value

    def text_of(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if name is None:
            return "${"
        if name in environment:
            used.append(name)
            return environment[name]
        if default is None:
            raise ConfigError(f"{source}: ${{{name}}}: variable {name} is not set; set it or write ${{{name}:default}}")
        return default

    if "${" in _VARIABLE.sub("", value):
        raise ConfigError(
            f"{source}: malformed variable in '{value}'; write ${{NAME}} or ${{NAME:default}}, and $${{ for ${{"
        )
    whole = _VARIABLE.fullmatch(value)
    text = _VARIABLE.sub(text_of, value)
    if whole and whole["name"]:
        return typed(text, f"{source}: ${{{whole['name']}}}")
    return plain(text, source)
