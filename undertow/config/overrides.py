"""Values from outside the recipe: `section.key=value` words and `UNDERTOW__SECTION__KEY` variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from undertow.config.errors import ConfigError
from undertow.config.layer import Entry, Layer, Rank, put
from undertow.config.scalars import plain, told, typed

PREFIX = "UNDERTOW__"


def command_line(words: Sequence[str]) -> Layer:
    """One layer from `key.sub=value` words, typed as YAML; the later of two words for one key wins.

    Raises `ConfigError` for a word without `=` or with an empty key.
    """
    layer: Layer = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(
                f"command line: {told(word)} is not of the form section.key=value, such as train.steps=100"
            )
        key = key.strip()
        _check(key, "command line")
        put(layer, key, Entry(typed(text, f"command line: {key}"), "command line", Rank.COMMAND_LINE))
    return layer


def variables(environment: Mapping[str, str]) -> Layer:
    """One layer from variables such as `UNDERTOW__TRAIN__STEPS=100`, which sets `train.steps` in any recipe."""
    layer: Layer = {}
    for name in sorted(environment):
        if name.startswith(PREFIX):
            key = name.removeprefix(PREFIX).lower().replace("__", ".")
            _check(key, f"environment {name}")
            source = f"environment {name}"
            put(layer, key, Entry(typed(environment[name], f"{source}: {key}"), source, Rank.ENVIRONMENT))
    return layer


def _check(key: str, source: str) -> None:
    plain(key, f"{source}: a key")
    if not all(key.split(".")):
        raise ConfigError(f"{source}: {told(key)} is not a key; write section.key, such as train.steps")
