"""Ways to keep less of a layer: nothing, single modules and sets of them, or the whole layer computed again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any, Literal, NamedTuple

from undertow.planner.memory.modules import modules_of
from undertow.planner.memory.recompute import Module, Recompute
from undertow.planner.memory.saved import SavedTable
from undertow.planner.timing.costs import ModelTimes

Granularity = Literal["layer", "module"]
"""What is computed again: whole layers, or single modules too."""


class Option(NamedTuple):
    """What is computed again of a layer (None: all of it), the seconds that this adds, the bytes that it frees, and
    those that are there again for a moment in the backward pass."""

    modules: frozenset[Module] | None
    seconds: float
    freed: int
    back: int


class Kind(NamedTuple):
    """Layers of one stage that are alike, earliest first, with what can be done about each of them: `options`, cheapest
    first, which is to keep all. `steps` lead from one of them to a later one that frees more: seconds for a byte, which
    rise from step to step, and both options. `order` are the options by what they bring back, most first."""

    chunk: int
    layers: tuple[int, ...]
    options: tuple[Option, ...]
    steps: tuple[tuple[float, int, int], ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, chunk: int, layers: tuple[int, ...], options: tuple[Option, ...]) -> Kind:
        """With the steps that follow from the options: along the lower convex hull of seconds over bytes."""
        hull, most = [0], 0
        for at, option in enumerate(options):
            if option.freed <= most:
                continue
            most = option.freed
            while len(hull) > 1 and _rate(options, hull[-1], at) <= _rate(options, hull[-2], hull[-1]):
                hull.pop()
            hull.append(at)
        steps = tuple((_rate(options, a, b), a, b) for a, b in pairwise(hull))
        order = sorted(range(len(options)), key=lambda at: -options[at].back)
        return cls(chunk, layers, options, steps, tuple(order))


@dataclass(frozen=True)
class LayerOptions:
    """The options of all layers, each made once."""

    saved: SavedTable
    times: ModelTimes
    granularity: Granularity = "layer"
    _known: dict[tuple[Any, ...], tuple[Option, ...]] = field(default_factory=dict)
    _kinds: dict[tuple[int, tuple[int, ...]], tuple[Kind, ...]] = field(default_factory=dict)

    def of(self, layer: int) -> tuple[Option, ...]:
        """Of a decoder layer: those that no other is better than in everything, made once for layers that are alike."""
        times, saved = self.times, self.saved
        seconds = tuple(times.modules[layer].items()) if self.granularity == "module" else ()
        place = times.blocks[layer].forward, saved.full[layer], saved.m.config.kind(layer), layer > 0, seconds
        if place not in self._known:
            self._known[place] = undominated(self._all(layer))
        return self._known[place]

    def _all(self, layer: int) -> Iterator[Option]:
        full = self.saved.full[layer]
        for modules in _sets(modules_of(self.saved.m.implementation) if self.granularity == "module" else ()):
            again = Recompute(modules=frozenset((layer, module) for module in modules))
            seconds = float(self.times.again(layer, again))
            left, back = self.saved.left(layer, again)
            yield Option(frozenset(modules), seconds, full - left, back)
        freed = full - self.saved.recomputed[layer]
        yield Option(None, float(self.times.blocks[layer].forward), freed, freed)

    def kinds(self, chunk: int, layers: tuple[int, ...]) -> tuple[Kind, ...]:
        """Layers of a stage by what they are alike in. Of such, the earliest leave least to be made room for while they
        are computed again. MTP blocks are left out: they are never computed again."""
        place = chunk, layers
        if place not in self._kinds:
            alike: dict[tuple[tuple[Option, ...], int], list[int]] = {}
            for layer in layers:
                if layer < self.times.config.num_hidden_layers:
                    alike.setdefault((self.of(layer), self.saved.full[layer]), []).append(layer)
            found = ((tuple(each), options) for (options, _), each in alike.items())
            self._kinds[place] = tuple(Kind.of(chunk, each, options) for each, options in found)
        return self._kinds[place]


def _sets(modules: Sequence[Module]) -> Iterator[tuple[Module, ...]]:
    """All sets of modules but those with `moe` beside a part of it."""
    for count in range(len(modules) + 1):
        for chosen in combinations(modules, count):
            if "moe" not in chosen or not {"expert_activation", "shared_expert"} & set(chosen):
                yield chosen


def undominated(options: Iterable[Option]) -> tuple[Option, ...]:
    """Cheapest first, without those that free no more than a cheaper one and bring no less back."""
    found: list[Option] = []
    for option in sorted(options, key=lambda each: (each.seconds, -each.freed, each.back)):
        if not any(other.freed >= option.freed and other.back <= option.back for other in found):
            found.append(option)
    return tuple(found)


def _rate(options: Sequence[Option], fewer: int, more: int) -> float:
    """Seconds for a byte from one option to another."""
    return (options[more].seconds - options[fewer].seconds) / (options[more].freed - options[fewer].freed)
