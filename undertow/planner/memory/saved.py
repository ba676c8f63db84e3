"""Bytes that one microbatch keeps on a stage: as it is, with parts computed again, and for its weight gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from undertow.model.activations import Objective, place_of, saved_terms
from undertow.model.modules import freed_at_first
from undertow.planner.memory.activations import Microbatch, Saved, end_gradients, layer_gradients, layer_saved
from undertow.planner.memory.modules import check_modules, modules_of
from undertow.planner.memory.parameters import Stage
from undertow.planner.memory.recompute import NONE, Module, Recompute


class StageSaved(NamedTuple):
    """Bytes that one microbatch keeps on a stage. `kept` follows `Stage.layers`; `ends` are embedding and head, in all.
    `transient` is what recomputation adds at the worst moment of the backward pass."""

    kept: tuple[int, ...]
    ends: int
    transient: int

    @property
    def total(self) -> int:
        """Without the transient."""
        return sum(self.kept) + self.ends


class StageDeferred(NamedTuple):
    """Bytes of one microbatch on a stage that stay for its weight gradients when the gradient of its input is made:
    `inputs` are part of what it kept, `gradients` come besides. `transient` is what the gradients take, at the worst
    moment of that, beyond what has been freed by then."""

    inputs: int
    gradients: int
    transient: int

    @property
    def total(self) -> int:
        """Inputs and gradients."""
        return self.inputs + self.gradients


class _Part(NamedTuple):
    """Of a layer: bytes that a module frees, and what it brings back in the first and in the second half."""

    freed: int
    first: int
    second: int


@dataclass(frozen=True)
class SavedTable:
    """Bytes that each place keeps for one microbatch, so that many divisions into stages can be tried.

    `measured` are bytes of a full layer by kind of attention, and replace the closed forms.
    """

    m: Microbatch
    measured: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def _rows(self) -> tuple[tuple[Saved, ...], ...]:
        config, alike = self.m.config, {}
        for layer in range(config.num_hidden_layers + config.num_nextn_predict_layers):
            kind = layer if self.m.implementation == "reference" else config.compress_ratios[layer]
            alike[layer] = alike.get(("of", kind)) or layer_saved(self.m, layer)
            alike["of", kind] = alike[layer]
        return tuple(rows for layer, rows in alike.items() if isinstance(layer, int))

    @cached_property
    def full(self) -> tuple[int, ...]:
        """Of each layer that is not recomputed, MTP blocks last."""
        known, kind = self.measured, self.m.config.kind
        closed = (sum(row.bytes for row in rows) for rows in self._rows)
        return tuple(known.get(kind(layer), size) for layer, size in enumerate(closed))

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """Of each layer that is recomputed: its streams; the reference keeps one of them in layer 0, and what the
        balance loss reads."""
        config, m = self.m.config, self.m
        if m.implementation != "reference":
            return (m.streams,) * len(self.full)
        trunk = range(config.num_hidden_layers)
        kept = _by_place(m, replace(m.objective, recompute=frozenset(trunk)))
        return (*(kept[place_of(config, layer)] for layer in trunk), *(m.streams for _ in self.full[len(trunk) :]))

    @cached_property
    def _parts(self) -> tuple[dict[Module, _Part], ...]:
        return tuple(self._parts_of(rows) for rows in self._rows)

    def _parts_of(self, rows: tuple[Saved, ...]) -> dict[Module, _Part]:
        parts = {}
        for module in modules_of(self.m.implementation):
            freed = sum(row.bytes for row in rows if row.module == module or (module == "moe" and row.moe))
            early = freed_at_first(module, freed)
            parts[module] = _Part(freed, early, freed - early)
        return parts

    def freed(self, layer: int, module: Module) -> int:
        """Bytes that a module of a layer frees if it is computed again."""
        return self._parts[layer][module].freed

    def left(self, layer: int, recompute: Recompute) -> tuple[int, int]:
        """Bytes that a layer keeps, and those that it brings back in its backward pass: of modules, the more that
        either half does, for the second half is done with when the first begins."""
        full, least = self.full[layer], self.recomputed[layer]
        if layer in recompute.layers:
            return least, full - least
        if not (modules := recompute.by_layer.get(layer)):
            return full, 0
        parts = [self._parts[layer][module] for module in modules]
        left = max(least, full - sum(part.freed for part in parts))
        return left, min(full - left, max(sum(part.first for part in parts), sum(part.second for part in parts)))

    @cached_property
    def _places(self) -> dict[str, int]:
        m = self.m
        if m.implementation == "reference":
            return _by_place(m, m.objective)
        return {"embedding": m.own * m.config.hidden_size * 2}

    def _ends(self, stage: Stage) -> int:
        """Embedding and head of a stage; for `tight` and `primus` the embedding alone, one stream."""
        mtp = any(layer >= self.m.config.num_hidden_layers for layer in stage.layers)
        places = {
            "embedding": stage.embedding, "all layers": bool(stage.layers), "head": stage.head,
            "mtp input": mtp, "mtp head": mtp,
        }  # fmt: skip
        return sum(self._places.get(place, 0) for place, here in places.items() if here)

    def stage(self, stage: Stage, recompute: Recompute = NONE) -> StageSaved:
        """Bytes of a stage whose layers in `recompute` keep their streams alone, or all but what modules free.

        The backward pass frees layers from the last to the first, and computes a recomputed one again when it comes to
        it; what that takes beyond what the later layers had freed is the transient. Raises `ConfigError` for modules
        that the implementation has not.
        """
        if recompute.modules:
            check_modules(self.m.implementation, recompute)
        freed = transient = 0
        kept = []
        for layer in reversed(stage.layers):
            left, back = self.left(layer, recompute)
            transient = max(transient, back - freed)
            freed += left
            kept.append(left)
        return StageSaved(tuple(reversed(kept)), self._ends(stage), transient)

    @cached_property
    def _deferred(self) -> tuple[tuple[int, int], ...]:
        """Of each layer, bytes of inputs and of gradients that its weight gradients read."""
        if self.m.implementation == "reference":
            return tuple((full, 0) for full in self.full)
        inputs = [sum(row.bytes for row in rows if row.for_weight) for rows in self._rows]
        return tuple(
            (min(size, full), sum(row.bytes for row in layer_gradients(self.m, layer)))
            for layer, (size, full) in enumerate(zip(inputs, self.full, strict=True))
        )

    def deferred(self, stage: Stage) -> StageDeferred:
        """What stays for the weight gradients of a stage where a schedule splits the backward pass.

        All that the reference keeps, which is an upper bound: its operators have no split backward pass.
        """
        own, blocks = self.m.implementation == "reference", self.m.config.num_hidden_layers
        heads = stage.head + sum(layer >= blocks for layer in stage.layers)
        made = 0 if own else heads * sum(row.bytes for row in end_gradients(self.m))
        inputs, freed, transient = self._ends(stage) if own else 0, 0, made
        for layer in reversed(stage.layers):
            read, gradients = self._deferred[layer]
            inputs, made = inputs + read, made + gradients
            transient = max(transient, made - freed)
            freed += self.full[layer] - read
        return StageDeferred(inputs, made, transient)


def _by_place(m: Microbatch, objective: Objective) -> dict[str, int]:
    p, sums = m.pass_, defaultdict(int)
    for term in saved_terms(p.config, p.documents, p.dtype, objective, kernels=p.kernels):
        sums[term.place] += term.bytes
    return dict(sums)
