"""Which layers of a rank are computed again: the cheapest set with which the rank stays within its bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import NamedTuple

from undertow.planner.case import Case, Span
from undertow.planner.memory import Held
from undertow.planner.parameters import Stage

MOST_SETS = 2000  # sets that are all looked at; beyond, layers are taken by seconds for a byte


class Choice(NamedTuple):
    """Layers computed again on a rank, the seconds that this adds to each of its stages, and the rank's bytes."""

    layers: frozenset[int]
    extra: tuple[float, ...]
    bytes: int

    @property
    def seconds(self) -> float:
        """Added for one microbatch, all stages of the rank."""
        return sum(self.extra)


class _Kind(NamedTuple):
    """Layers of one stage that are alike, earliest first."""

    chunk: int
    layers: tuple[int, ...]
    seconds: float
    freed: int


@dataclass(frozen=True)
class Knapsacks:
    """The choices of all ranks of a case, each made once."""

    case: Case
    _made: dict[tuple[int, tuple[Span, ...], int], Choice | None] = field(default_factory=dict)
    _static: dict[tuple[int, tuple[Span, ...]], int] = field(default_factory=dict)
    _fewest: dict[tuple[int, tuple[Span, ...]], int] = field(default_factory=dict)

    def choose(self, rank: int, of: tuple[Span, ...], limit: int) -> Choice | None:
        """The cheapest set for a rank that holds stages `of`; of equals the one of fewest bytes, then of fewest layers.
        None if the rank is over `limit` bytes whatever is computed again, or under a schedule that forbids it."""
        key = (rank, of, limit)
        if key not in self._made:
            self._made[key] = self._choose(rank, of, limit)
        return self._made[key]

    @property
    def _exact(self) -> bool:
        """Whether the memory model knows the peak moment by moment: then bytes do not add up by layers."""
        return self.case.stages == 1 and self.case.memory.exact([Held(Stage(()), 1)])

    def bytes(self, rank: int, of: tuple[Span, ...], layers: frozenset[int] = frozenset()) -> int:
        """Bytes of a rank: its state, and the microbatches it holds at the worst moment."""
        stages = [self.case.stage(span) for span in of]
        if self._exact:
            return self.case.memory.rank(rank, [Held(stages[0], 1)], layers).total_bytes
        place = (rank, of)
        if place not in self._static:
            self._static[place] = self.case.static_bytes(rank, of)
        saved = [self.case.memory.saved.stage(stage, layers) for stage in stages]
        most = max(sum(n * s.total for n, s in zip(c, saved, strict=True)) for c in self.case.in_flight[rank])
        return self._static[place] + most + max(s.transient for s in saved)

    def fewest_bytes(self, rank: int, of: tuple[Span, ...]) -> int:
        """Bytes of a rank that computes all of its decoder layers again, where that is allowed, but for what this takes
        at the worst moment: about the fewest it can have."""
        if self._exact:
            return self.bytes(rank, of, frozenset(range(self.case.times.config.num_hidden_layers)))
        if (rank, of) not in self._fewest:
            again = () if self.case.plan.split else (layer for kind in self._kinds(of) for layer in kind.layers)
            layers = frozenset(again)
            saved = [self.case.memory.saved.stage(self.case.stage(span), layers) for span in of]
            every = self.bytes(rank, of, layers) - max(s.transient for s in saved)
            self._fewest[rank, of] = min(every, self.bytes(rank, of))
        return self._fewest[rank, of]

    def _choose(self, rank: int, of: tuple[Span, ...], limit: int) -> Choice | None:
        nothing = Choice(frozenset(), (0.0,) * len(of), self.bytes(rank, of))
        if nothing.bytes <= limit:
            return nothing
        if self.case.plan.split or self.fewest_bytes(rank, of) > limit:
            return None
        kinds = list(self._kinds(of))
        counts = self.case.in_flight[rank]
        if prod(len(kind.layers) + 1 for kind in kinds) > MOST_SETS:
            return self._greedy(rank, of, limit, kinds)
        best: Choice | None = None
        for seconds, taken in _all_sets(kinds, counts, 0 if self._exact else nothing.bytes - limit):
            if best and seconds > best.seconds * (1 + 1e-12):
                break
            made = self._make(rank, of, kinds, taken)
            if made.bytes > limit:
                continue
            if best is None or (made.bytes, len(made.layers)) < (best.bytes, len(best.layers)):
                best = made
        return best

    def _greedy(self, rank: int, of: tuple[Span, ...], limit: int, kinds: Sequence[_Kind]) -> Choice | None:
        """The layers of fewest seconds for a byte, until the rank fits; then none that it would fit without."""
        most = [max(count[kind.chunk] for count in self.case.in_flight[rank]) for kind in kinds]
        order = sorted(range(len(kinds)), key=lambda k: kinds[k].seconds / max(most[k] * kinds[k].freed, 1))
        taken = [0] * len(kinds)
        made: Choice | None = None
        for k in (each for each in order for _ in kinds[each].layers):
            taken[k] += 1
            made = self._make(rank, of, kinds, taken)
            if made.bytes <= limit:
                break
        else:
            return None
        for k in sorted(order, key=lambda k: -kinds[k].seconds):
            while taken[k]:
                taken[k] -= 1
                fewer = self._make(rank, of, kinds, taken)
                if fewer.bytes > limit:
                    taken[k] += 1
                    break
                made = fewer
        return made

    def _make(self, rank: int, of: tuple[Span, ...], kinds: Sequence[_Kind], taken: Sequence[int]) -> Choice:
        """The choice of the earliest so many of each kind."""
        layers = frozenset(layer for n, kind in zip(taken, kinds, strict=True) for layer in kind.layers[:n])
        extra = [0.0] * len(of)
        for n, kind in zip(taken, kinds, strict=True):
            extra[kind.chunk] += n * kind.seconds
        return Choice(layers, tuple(extra), self.bytes(rank, of, layers))

    def _kinds(self, of: tuple[Span, ...]) -> Iterator[_Kind]:
        """Alike in seconds and bytes: of such, the earliest leave least to be made room for while computed again."""
        saved, blocks = self.case.memory.saved, self.case.times.blocks
        for chunk, span in enumerate(of):
            alike: dict[tuple[float, int, int], list[int]] = defaultdict(list)
            for layer in self.case.stage(span).layers:
                if layer < self.case.times.config.num_hidden_layers:
                    forward = float(blocks[layer].forward)
                    alike[forward, saved.full[layer], saved.recomputed[layer]].append(layer)
            for (forward, full, left), layers in alike.items():
                yield _Kind(chunk, tuple(layers), forward, full - left)


def _all_sets(kinds: Sequence[_Kind], counts: Sequence[tuple[int, ...]], needed: int):
    """How many of each kind, cheapest first, of the sets that could free `needed` bytes."""
    most = [max(count[kind.chunk] for count in counts) for kind in kinds]
    found = []
    for taken in product(*(range(len(kind.layers) + 1) for kind in kinds)):
        if sum(n * m * kind.freed for n, m, kind in zip(taken, most, kinds, strict=True)) >= needed:
            found.append((sum(n * kind.seconds for n, kind in zip(taken, kinds, strict=True)), taken))
    return sorted(found)
