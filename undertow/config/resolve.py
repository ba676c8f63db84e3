"""Recipe, environment and command line together as one checked configuration whose every value knows its source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from undertow.config import mistakes, optimizations
from undertow.config.chain import read_chain
from undertow.config.errors import ConfigError
from undertow.config.layer import SECTION, Entry, Layer, Rank, flat, merge, nested, put
from undertow.config.overrides import command_line, variables
from undertow.config.paths import recipe_path
from undertow.config.presets import PRESETS, nearest, preset
from undertow.config.schema import RunConfig
from undertow.config.section import Section
from undertow.config.tracking import Tracked

DEFAULT = "default"


@dataclass(frozen=True)
class Resolved:
    """A configuration, the preset its model starts from, and the source of each dotted key."""

    config: RunConfig
    sources: dict[str, str]
    preset: str | None

    @cached_property
    def _view(self) -> Tracked:
        return Tracked(self.config)

    @property
    def tracked(self) -> RunConfig:
        """The configuration as a run reads it: the same attributes, each reading noted for `refuse_unread`."""
        return cast(RunConfig, self._view)

    def refuse_unread(self) -> None:
        """Refuse to go on when somebody gave a key a value of its own that nothing has read through `tracked`.

        A default that is spelled out, as in the `config.yaml` of a run, asks for nothing and may stay unread.
        Raises `ConfigError` naming each such key and its source. Call it when all is built, before the first step.
        """
        unread = [
            key
            for key, source in self.sources.items()
            if source != DEFAULT and not self._view.was_read(key) and not _is_default(self.config, key)
        ]
        if unread:
            listed = ", ".join(f"{key} ({self.sources[key]})" for key in unread)
            raise ConfigError(f"nothing in this run reads {listed}; remove what has no effect here")


def resolve(recipe: str | Path | None, overrides: Sequence[str], environment: Mapping[str, str]) -> Resolved:
    """Resolve a recipe (path, name or none) with `key=value` overrides.

    Precedence: preset < family < variant < experiment (the order of `extends`) < optimisation switch < environment <
    command line; `environment` holds both the `${NAME}` of recipes and `UNDERTOW__SECTION__KEY`. Raises `ConfigError`.
    """
    files = [] if recipe is None else read_chain(recipe_path(recipe), environment)
    layers: list[Layer] = []
    for layer in [*files, variables(environment), command_line(overrides)]:
        layers += [optimizations.expand(layer), layer]
    merged = merge(layers)
    chosen = merged.pop("model.preset", None)
    name = None if chosen is None else _preset_name(chosen)
    if name is not None:
        shape: Layer = {}
        for key, value in flat({"model": preset(name).model_dump()}).items():
            put(shape, key, Entry(value, f"preset {name}", Rank.PRESET))
        merged = merge([shape, merged])
    try:
        # As JSON, because there lists may fill tuples while strictness still reaches the model's own fields.
        config = RunConfig.model_validate_json(json.dumps(nested(merged)), strict=True)
    except ValidationError as error:
        raise mistakes.explain(error, merged) from None
    written = {key: entry.source for key, entry in merged.items() if entry.value is not SECTION}
    sources = {key: written.get(key, DEFAULT) for key in flat(config.model_dump())}
    if chosen is not None:
        sources = {"model.preset": chosen.source, **sources}
    return Resolved(config, sources, name)


def _preset_name(chosen: Entry) -> str:
    if not isinstance(chosen.value, str) or chosen.value not in PRESETS:
        close = nearest(chosen.value, list(PRESETS)) if isinstance(chosen.value, str) else ""
        raise ConfigError(f"{chosen.source}: model.preset is {chosen.told()}{close}; allowed: {', '.join(PRESETS)}")
    return chosen.value


def _is_default(config: RunConfig, key: str) -> bool:
    """Whether a dotted key has the value that it would have had anyway."""
    section: Any = config
    *sections, name = key.split(".")
    for each in sections:
        section = getattr(section, each, None)
    field = type(section).model_fields.get(name) if isinstance(section, Section) else None
    return field is not None and not field.is_required() and getattr(section, name) == field.default
