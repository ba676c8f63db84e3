"""What the backward pass computes again instead of keeping it: whole layers, or single modules of other layers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from undertow.config.errors import ConfigError
from undertow.config.layout import Layout
from undertow.config.presets import nearest
from undertow.config.scalars import told
from undertow.config.training import RecomputeModule
from undertow.model.modules import MODULES, WITHIN_MOE

Module = RecomputeModule
"""A part of a layer that can be computed again by itself."""

_FORMS = "none, all, 0,4,10-12, or first:3 of each stage"


@dataclass(frozen=True)
class Recompute:
    """`layers` are computed again whole, `modules` are pairs of another layer and a part of it.

    Raises `ConfigError` for a module of a layer that is computed again whole, and for `moe` beside its own parts.
    """

    layers: frozenset[int] = frozenset()
    modules: frozenset[tuple[int, Module]] = frozenset()

    def __post_init__(self) -> None:
        for layer, modules in sorted(self.by_layer.items()):
            if layer in self.layers:
                raise ConfigError(
                    f"layer {layer} is recomputed whole, and its {sorted(modules)[0]} besides; name one of the two"
                )
            if "moe" in modules and (inside := sorted(modules & WITHIN_MOE)):
                raise ConfigError(
                    f"layer {layer}: moe is recomputed, and {inside[0]}, which is a part of it; name one of the two"
                )

    @classmethod
    def of(cls, layers: Iterable[int] = (), **modules: Iterable[int]) -> Recompute:
        """Whole layers, and layers by the name of a module."""
        named: set[tuple[int, Module]] = set()
        for name, where in modules.items():
            named |= {(layer, module_of(name)) for layer in where}
        return cls(frozenset(layers), frozenset(named))

    @classmethod
    def union(cls, parts: Iterable[Recompute]) -> Recompute:
        """All of several."""
        each = list(parts)
        return cls(
            frozenset().union(*(part.layers for part in each)), frozenset().union(*(part.modules for part in each))
        )

    def __bool__(self) -> bool:
        return bool(self.layers or self.modules)

    def __len__(self) -> int:
        """Layers and modules."""
        return len(self.layers) + len(self.modules)

    def __str__(self) -> str:
        """As `read_recompute` takes it, ranges for layers that follow each other."""
        parts = [ranges(self.layers)] if self.layers else []
        parts += [f"{module}:{ranges(layers)}" for module, layers in self.by_module.items()]
        return "; ".join(parts) or "none"

    @cached_property
    def by_layer(self) -> dict[int, frozenset[Module]]:
        """Modules of each layer that has some."""
        found: dict[int, set[Module]] = defaultdict(set)
        for layer, module in self.modules:
            found[layer].add(module)
        return {layer: frozenset(modules) for layer, modules in found.items()}

    @cached_property
    def by_module(self) -> dict[Module, tuple[int, ...]]:
        """Layers of each module that has some, in the order of `MODULES`."""
        found: dict[Module, tuple[int, ...]] = {}
        for module in MODULES:
            if layers := sorted(layer for layer, each in self.modules if each == module):
                found[module] = tuple(layers)
        return found

    @property
    def touched(self) -> frozenset[int]:
        """Layers of which anything is computed again."""
        return self.layers | self.by_layer.keys()

    def json(self) -> dict[str, Any]:
        """`layers` as a list of numbers, `modules` as such lists by name."""
        return {
            "layers": sorted(self.layers),
            "modules": {module: list(layers) for module, layers in self.by_module.items()},
        }


NONE = Recompute()


def module_of(name: str) -> Module:
    """The module of that name. Raises `ConfigError` with the nearest one."""
    if name not in MODULES:
        raise ConfigError(f"unknown module '{name}'{nearest(name, list(MODULES))} (modules: {', '.join(MODULES)})")
    return name  # type: ignore[return-value]


def ranges(layers: Iterable[int]) -> str:
    """Numbers as text, such as `0, 4, 10-12`, or `none`."""
    runs = groupby(enumerate(sorted(layers)), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends) or "none"


def read_recompute(text: str, layout: Layout) -> Recompute:
    """What to compute again, from text: terms with `;` or spaces between, each either layers or `MODULE:LAYERS`.

    LAYERS are `none`, `all`, numbers and ranges as `0,4,10-12`, or `first:N`, the first N of each stage. A layer that
    is named whole and by module is computed again whole. Raises `ConfigError` for another form, an unknown module, and
    layers that the layout does not have.
    """
    said = f"recompute {told(text)}"
    whole: set[int] = set()
    named: set[tuple[int, Module]] = set()
    for term in re.sub(r"\s*([,:;])\s*", r"\1", text.strip()).replace(";", " ").split() or [""]:
        name, colon, where = term.partition(":")
        if not colon or name == "first":
            whole |= _layers(term, layout, said)
            continue
        try:
            module = module_of(name)
        except ConfigError as error:
            raise ConfigError(f"{said}: {error}; layers are {_FORMS}") from None
        named |= {(layer, module) for layer in _layers(where, layout, said)}
    try:
        return Recompute(frozenset(whole), frozenset(each for each in named if each[0] not in whole))
    except ConfigError as error:
        raise ConfigError(f"{said}: {error}") from None


def recompute_of(asked: str | Sequence[int] | Recompute, layout: Layout) -> Recompute:
    """What a user asks for: text, numbers of layers, or the value itself."""
    if isinstance(asked, Recompute):
        return asked
    return read_recompute(asked if isinstance(asked, str) else ",".join(map(str, asked)) or "none", layout)


def _layers(text: str, layout: Layout, said: str) -> frozenset[int]:
    layers = range(sum(layout.counts("t")))
    if text in ("none", "all"):
        return frozenset(layers if text == "all" else ())
    if text.startswith("first:"):
        count = _number(text.removeprefix("first:"), said)
        return frozenset(n for stage in range(len(layout.stages)) for n in layout.layers(stage)[:count])
    found = frozenset(_numbers(text, said))
    if wrong := sorted(found - set(layers)):
        raise ConfigError(f"{said}: layer {wrong[0]} is none of this model's, 0 to {layers[-1]}")
    return found


def _numbers(text: str, said: str) -> Iterator[int]:
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low = _number(first, said)
        high = _number(last, said) if dash else low
        if high < low:
            raise ConfigError(f"{said}: the range {part} runs backwards")
        yield from range(low, high + 1)


def _number(text: str, said: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise ConfigError(f"{said}: {told(text)} is no layer number; write {_FORMS}")
    return int(text)
