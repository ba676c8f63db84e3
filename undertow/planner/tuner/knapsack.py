"""What is computed again on a rank: the cheapest set with which the rank stays within its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import comb, prod
from typing import NamedTuple

from undertow.planner.memory.model import Held
from undertow.planner.memory.parameters import Stage
from undertow.planner.memory.recompute import NONE, Module, Recompute
from undertow.planner.options import Kind, LayerOptions
from undertow.planner.tuner.case import Case, Span
from undertow.planner.tuner.levels import Levels, all_sets, cheaper, dot, fill, freed_bytes

_TRIES = 3  # changes of a set that are weighed before it is left as it is
MOST_SETS = 2000  # sets that are all looked at; beyond, options are taken by seconds for a byte


class Choice(NamedTuple):
    """What is computed again on a rank, the seconds that this adds to each of its stages, and the rank's bytes."""

    recompute: Recompute
    extra: tuple[float, ...]
    bytes: int

    @property
    def seconds(self) -> float:
        """Added for one microbatch, all stages of the rank."""
        return sum(self.extra)


@dataclass(frozen=True)
class Knapsacks:
    """The choices of all ranks of a case, each made once.

    Exact where the sets are few enough to look at all of them (`MOST_SETS`). Otherwise options are taken by seconds for
    a byte, the last one the cheapest that suffices: of ranks that hold most at one moment only, and but for what
    layers take while they are computed again, this is less than one step of one layer dearer than the cheapest set.
    """

    case: Case
    _made: dict[tuple[int, tuple[Span, ...], int], Choice | None] = field(default_factory=dict)
    _static: dict[tuple[int, tuple[Span, ...]], int] = field(default_factory=dict)
    _fewest: dict[tuple[int, tuple[Span, ...]], int] = field(default_factory=dict)

    def choose(self, rank: int, of: tuple[Span, ...], limit: int) -> Choice | None:
        """The cheapest set for a rank that holds stages `of`; of equals the one of fewest bytes, then of fewest layers
        and modules. None if the rank is over `limit` bytes whatever is computed again, or under a schedule that forbids
        it."""
        key = (rank, of, limit)
        if key not in self._made:
            self._made[key] = self._choose(rank, of, limit)
        return self._made[key]

    @cached_property
    def _options(self) -> LayerOptions:
        return LayerOptions(self.case.memory.saved, self.case.times, self.case.granularity)

    @property
    def _exact(self) -> bool:
        """Whether the memory model knows the peak moment by moment: then bytes do not add up by layers."""
        return self.case.stages == 1 and self.case.memory.exact([Held(Stage(()), 1)])

    def bytes(self, rank: int, of: tuple[Span, ...], recompute: Recompute = NONE) -> int:
        """Bytes of a rank: its state, and the microbatches it holds at the worst moment."""
        stages, table = [self.case.stage(span) for span in of], self.case.memory.saved
        if self._exact:
            return self.case.memory.rank(rank, [Held(stages[0], 1)], recompute).total_bytes
        place = (rank, of)
        if place not in self._static:
            self._static[place] = self.case.static_bytes(rank, of)
        saved = [table.stage(stage, recompute) for stage in stages]
        sizes, transient = [each.total for each in saved], max(each.transient for each in saved)
        if self.case.plan.split:
            deferred = [table.deferred(stage) for stage in stages]
            sizes += [each.total for each in deferred]
            transient = max(each.transient for each in deferred)
        most = max(sum(n * size for n, size in zip(c, sizes, strict=True)) for c in self.case.in_flight[rank])
        return self._static[place] + most + transient

    def fewest_bytes(self, rank: int, of: tuple[Span, ...]) -> int:
        """Bytes of a rank that computes all of its decoder layers again, where that is allowed, but for what this takes
        at the worst moment: about the fewest it can have."""
        if self._exact:
            return self.bytes(rank, of, Recompute(frozenset(range(self.case.times.config.num_hidden_layers))))
        if (rank, of) not in self._fewest:
            plain = self.bytes(rank, of)
            if self.case.plan.split:
                self._fewest[rank, of] = plain
            else:
                every = Recompute(frozenset(layer for kind in self._kinds(of) for layer in kind.layers))
                saved = [self.case.memory.saved.stage(self.case.stage(span), every) for span in of]
                least = self.bytes(rank, of, every) - max(each.transient for each in saved)
                self._fewest[rank, of] = min(least, plain)
        return self._fewest[rank, of]

    def _kinds(self, of: tuple[Span, ...]) -> list[Kind]:
        stages = [self.case.stage(span).layers for span in of]
        return [kind for chunk, layers in enumerate(stages) for kind in self._options.kinds(chunk, layers)]

    def _choose(self, rank: int, of: tuple[Span, ...], limit: int) -> Choice | None:
        nothing = Choice(NONE, (0.0,) * len(of), self.bytes(rank, of))
        if nothing.bytes <= limit:
            return nothing
        if self.case.plan.split or self.fewest_bytes(rank, of) > limit:
            return None
        kinds = self._kinds(of)
        if prod(comb(len(kind.layers) + len(kind.options) - 1, len(kind.layers)) for kind in kinds) > MOST_SETS:
            return self._greedy(rank, of, limit, kinds, nothing.bytes - limit)
        best: Choice | None = None
        counts, held = self.case.in_flight[rank], self._held(rank, of)
        room = limit - nothing.bytes + max(held)
        most = [max(count[kind.chunk] for count in counts) for kind in kinds]
        for seconds, levels in all_sets(kinds, most, 0 if self._exact else nothing.bytes - limit):
            if best and seconds > best.seconds * (1 + 1e-12):
                break
            freed = freed_bytes(kinds, levels, len(of))
            if not self._exact and any(size - dot(c, freed) > room for size, c in zip(held, counts, strict=True)):
                continue  # too little at one moment, even if what comes back at the worst one took nothing
            made = self._make(rank, of, kinds, levels)
            if made.bytes > limit:
                continue
            if best is None or (made.bytes, len(made.recompute)) < (best.bytes, len(best.recompute)):
                best = made
        return best

    def _held(self, rank: int, of: tuple[Span, ...]) -> list[int]:
        """Bytes at each of the worst moments, nothing computed again."""
        sizes = [self.case.memory.saved.stage(self.case.stage(span)).total for span in of]
        return [dot(count, sizes) for count in self.case.in_flight[rank]]

    def _greedy(self, rank: int, of: tuple[Span, ...], limit: int, kinds: Sequence[Kind], needed: int) -> Choice | None:
        """Options by seconds for a byte until the rank fits: bytes are linear but for what comes back at the worst
        moment, so that what is missing of them is asked for besides, until nothing is."""
        counts = self.case.in_flight[rank]
        held = self._held(rank, of)
        wanted = [size - max(held) + needed for size in held]
        while True:
            levels = fill(kinds, counts, wanted)
            if levels is None:
                return None
            made = self._make(rank, of, kinds, levels)
            if made.bytes <= limit:
                return self._trim(rank, of, limit, kinds, levels, made)
            freed, over = freed_bytes(kinds, levels, len(of)), made.bytes - limit
            wanted = [max(want, dot(count, freed) + over) for want, count in zip(wanted, counts, strict=True)]

    def _trim(
        self, rank: int, of: tuple[Span, ...], limit: int, kinds: Sequence[Kind], levels: Levels, made: Choice
    ) -> Choice:
        """Cheaper options of single layers, or of one and a dearer one of another, as long as the rank fits."""
        improved = True
        while improved:
            improved = False
            for fewer in cheaper(kinds, self.case.in_flight[rank], levels, limit - made.bytes)[:_TRIES]:
                less = self._make(rank, of, kinds, fewer)
                if less.bytes <= limit and less.seconds < made.seconds:
                    made, levels, improved = less, fewer, True
                    break
        return made

    def _make(self, rank: int, of: tuple[Span, ...], kinds: Sequence[Kind], levels: Levels) -> Choice:
        """The choice with so many layers at each option. The backward pass frees later layers first, so that what the
        earliest bring back adds least to the peak."""
        whole: list[int] = []
        modules: set[tuple[int, Module]] = set()
        extra = [0.0] * len(of)
        for kind, level in zip(kinds, levels, strict=True):
            first = 0
            for at in (at for at in kind.order if level[at]):
                option, layers = kind.options[at], kind.layers[first : first + level[at]]
                first += level[at]
                extra[kind.chunk] += level[at] * option.seconds
                if option.modules is None:
                    whole += layers
                else:
                    modules.update(product(layers, option.modules))
        again = Recompute(frozenset(whole), frozenset(modules))
        return Choice(again, tuple(extra), self.bytes(rank, of, again))
