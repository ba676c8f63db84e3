"""Every layout of one stage a rank that could be the fastest, by what each stage makes an iteration take at least.

1F1B: until its first backward, rank s waits for the forward through all stages and the backward down to it; it then has
all m backwards to do and the forwards but the w = min(m, p - s) already done, and the backwards of the stages before it
follow. That is sum c + (m - 1) b + (m - w) f. Under any schedule the forwards of the stages before it come first, and
then its own work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from undertow.planner.pipeline.timeline import StageTime
from undertow.planner.tuner.case import Cuts, Span
from undertow.planner.tuner.trials import Trial, Trials

SLACKS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 1e9)
"""Shares above the lowest bound up to which layouts are looked at, in turn."""
MOST_PATHS = 3000
MOST_OPERATIONS = 1_500_000
"""Layouts looked at with one slack, and operations simulated for them."""


def enumerate_layouts(
    trials: Trials, keep: int, below: float = float("inf"), known: Sequence[Trial] = ()
) -> tuple[list[Trial], bool]:
    """The `keep` best layouts, best first, and whether none is faster than the first: unknown where they were too many.

    Layouts slower than `below` need not be found. `known` ones are taken to fit.
    """
    bounds = _Bounds(trials)
    best = sorted(known, key=lambda each: each.order)[:keep]
    seen = {trial.cuts for trial in best}
    if len(best) == keep:
        paths = bounds.paths(min(below, best[-1].seconds))
        if len(paths) < bounds.most:
            return _look(trials, paths, best, seen, keep), True
    elif bounds.least > below or not bounds.possible():
        return best, True
    complete = 0.0  # all layouts with bounds up to here have been looked at
    for slack in SLACKS:
        enough = min(below, best[-1].seconds) if len(best) == keep else below
        ceiling = min(bounds.least * (1 + slack), enough)
        paths = bounds.paths(ceiling)
        best = _look(trials, paths, best, seen, keep)
        if len(paths) >= bounds.most:
            return best, bool(best) and best[0].seconds <= complete
        complete = ceiling
        if ceiling >= below or (len(best) == keep and best[-1].seconds <= ceiling):
            break
    return best, True


def _look(
    trials: Trials, paths: Sequence[tuple[float, Cuts]], best: list[Trial], seen: set[Cuts], keep: int
) -> list[Trial]:
    """The `keep` best of those known and of layouts with their bounds, which are simulated as long as they may be."""
    for bound, cuts in sorted(paths):
        if len(best) == keep and bound > best[-1].seconds:
            break
        if cuts in seen:
            continue
        seen.add(cuts)
        if trial := trials.trial(cuts):
            best = sorted([*best, trial], key=lambda each: each.order)[:keep]
    return best


@dataclass(frozen=True)
class _Bounds:
    trials: Trials

    @cached_property
    def most(self) -> int:
        """Layouts that are looked at with one slack."""
        return min(MOST_PATHS, max(1, MOST_OPERATIONS // self.trials.case.order.operations))

    @cached_property
    def _before(self) -> list[StageTime]:
        """Seconds of all parts before each part."""
        sums = [StageTime(0.0, 0.0, 0.0)]
        for time in self.trials.case.part_times:
            sums.append(StageTime(*(float(a + b) for a, b in zip(sums[-1], time, strict=True))))
        return sums

    def of(self, stage: int, span: Span, extra: float = 0.0) -> float:
        """Seconds that an iteration takes at least with this stage, whose backward is `extra` longer."""
        floors = self.trials.floors
        if extra:
            return self._floor(stage, span, extra)
        if (stage, span) not in floors:
            floors[stage, span] = self._floor(stage, span, 0.0)
        return floors[stage, span]

    def _floor(self, stage: int, span: Span, extra: float) -> float:
        case, before = self.trials.case, self._before[span.first]
        m, (forward, backward, _, step) = case.microbatches, self.trials.time(span)
        backward += extra
        first = self._before[1].step if stage else step  # of rank 0, which holds the first part at least
        less = 1 - 1e-12  # sums in another order may come out a little higher
        if case.schedule != "1f1b":
            return float(before.forward + m * (forward + backward) + step) * less
        total = self._before[-1].forward + self._before[-1].backward + extra
        steady = total + (m - 1) * backward + (m - min(m, case.ranks - stage)) * forward
        own = before.forward + m * (forward + backward)
        ends = (steady + first, steady - before.backward + step, own + before.backward + first, own + step)
        return float(max(ends)) * less

    @cached_property
    def least(self) -> float:
        """The lowest bound of any layout, memory aside."""
        count, stages = len(self.trials.case.parts), self.trials.case.stages
        rest = [float("inf")] * count + [0.0]
        for stage in reversed(range(stages)):
            rest = [
                min(max(self.of(stage, Span(first, end)), rest[end]) for end in range(first + 1, count + 1))
                for first in range(count)
            ] + [float("inf")]
        return rest[0]

    def _room(self, stage: int, span: Span) -> bool:
        """Whether a stage may fit: if not, no longer one does."""
        return self.trials.knapsacks.fewest_bytes(stage, (span,)) <= self.trials.case.limits[stage]

    def possible(self) -> bool:
        """Whether the parts can be dealt out at all: the furthest that each stage can end, from any first part."""
        count, furthest = len(self.trials.case.parts), 0
        for stage in range(self.trials.case.stages):
            firsts, end = range(stage, furthest + 1), furthest
            for first in firsts if stage else (0,):
                end = max(end, first)
                while end < count and self._room(stage, Span(first, end + 1)):
                    end += 1
            furthest = end
        return furthest == count

    def paths(self, ceiling: float) -> list[tuple[float, Cuts]]:
        """Layouts that fit, with bounds of at most `ceiling`; `most` at most."""
        reach, stages = self._reach(ceiling), self.trials.case.stages
        found: list[tuple[float, Cuts]] = []

        def walk(stage: int, first: int, bound: float, cuts: Cuts) -> None:
            if stage == stages:
                found.append((bound, cuts))
                return
            for more, end in reach[stage].get(first, ()):
                if len(found) >= self.most:
                    return
                walk(stage + 1, end, max(bound, more), (*cuts, end))

        walk(0, 0, 0.0, ())
        return found

    def _reach(self, ceiling: float) -> list[dict[int, list[tuple[float, int]]]]:
        """For each stage and its first part, the bounds and ends from which the last part can be reached."""
        count, stages = len(self.trials.case.parts), self.trials.case.stages
        reach: list[dict[int, list[tuple[float, int]]]] = [{} for _ in range(stages)]
        ends = {count}
        for stage in reversed(range(stages)):
            for first in range(stage, count) if stage else (0,):
                for end in range(first + 1, count + 1):
                    span = Span(first, end)
                    if self.of(stage, span) > ceiling:
                        break
                    if end not in ends:
                        continue
                    choice = self.trials.choice(stage, (span,))
                    if choice is None and not self._room(stage, span):
                        break
                    if choice and (bound := self.of(stage, span, choice.seconds)) <= ceiling:
                        reach[stage].setdefault(first, []).append((bound, end))
            ends = set(reach[stage])
        return [{first: sorted(found) for first, found in each.items()} for each in reach]
