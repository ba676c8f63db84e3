"""Layouts of one case, simulated one by one, with the cheapest layers to compute again on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from undertow.planner.memory.recompute import Recompute
from undertow.planner.pipeline.timeline import StageTime
from undertow.planner.tuner.case import Case, Cuts, Span, spans
from undertow.planner.tuner.knapsack import Choice, Knapsacks


class Trial(NamedTuple):
    """One layout with the choice of every rank, and the seconds of an iteration."""

    seconds: float
    cuts: Cuts
    choices: tuple[Choice, ...]

    @property
    def recompute(self) -> Recompute:
        """What is computed again."""
        return Recompute.union(choice.recompute for choice in self.choices)

    @property
    def order(self) -> tuple[float, int, int, Cuts]:
        """Faster first, then of lower peak, then with less computed again."""
        peak = max(choice.bytes for choice in self.choices)
        return round(self.seconds, 10), peak, sum(len(choice.recompute) for choice in self.choices), self.cuts


@dataclass(frozen=True)
class Trials:
    """A case with what is known of it so far: choices of ranks, seconds of spans, and lower bounds from each stage."""

    case: Case
    knapsacks: Knapsacks
    floors: dict[tuple[int, Span], float] = field(default_factory=dict)
    _times: dict[Span, StageTime] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case) -> Trials:
        """Nothing known yet."""
        return cls(case, Knapsacks(case))

    def within(self, limits: tuple[int, ...]) -> Trials:
        """The same case with other limits, and what does not depend on them."""
        return replace(self, case=replace(self.case, limits=limits))

    @cached_property
    def before(self) -> list[tuple[float, float]]:
        """Seconds of all parts before each part: forward, and forward and backward."""
        sums = [(0.0, 0.0)]
        for time in self.case.part_times:
            ahead, both = sums[-1]
            sums.append((ahead + float(time.forward), both + float(time.forward + time.backward)))
        return sums

    def time(self, span: Span) -> StageTime:
        """Seconds of a span, nothing computed again."""
        if span not in self._times:
            self._times[span] = self.case.time(span)
        return self._times[span]

    def choice(self, rank: int, of: tuple[Span, ...]) -> Choice | None:
        """What a rank with such stages computes again; None if it is over its limit whatever that is."""
        return self.knapsacks.choose(rank, of, self.case.limits[rank])

    def least_seconds(self, cuts: Cuts) -> float:
        """No layout takes less: a rank waits for the forward of the stages before its first, works, and where the
        backward is not split, those stages' backwards follow."""
        case, before = self.case, self.before
        split, m = case.plan.split, case.microbatches
        work, first = [0.0] * case.ranks, 0
        for rank, end in zip(case.rank_of, cuts, strict=True):
            work[rank] += before[end][1] - before[first][1]
            first = end
        starts = (0, *cuts[: case.ranks - 1])
        most = max(before[at][not split] + m * each for at, each in zip(starts, work, strict=True))
        return most * (1 - 1e-9)

    def plain_seconds(self, cuts: Cuts) -> float:
        """Seconds if nothing were computed again: never more than those of the trial."""
        return self.case.seconds([self.time(span) for span in spans(cuts)])

    def trial(self, cuts: Cuts) -> Trial | None:
        """A layout simulated; None if it does not fit."""
        choices = []
        for rank, of in enumerate(self.case.rank_spans(cuts)):
            choice = self.choice(rank, of)
            if choice is None:
                return None
            choices.append(choice)
        return Trial(self.case.seconds(self._stages(cuts, choices)), cuts, tuple(choices))

    def exact(self, trial: Trial) -> Trial:
        """A trial with every microbatch simulated."""
        return trial._replace(seconds=self.case.exact_seconds(self._stages(trial.cuts, trial.choices)))

    def _stages(self, cuts: Cuts, choices: Sequence[Choice]) -> list[StageTime]:
        """Seconds of the stages, with what is computed again."""
        times = [self.time(span) for span in spans(cuts)]
        for rank, choice in enumerate(choices):
            for chunk, extra in enumerate(choice.extra):
                stage = self.case.plan.stage(rank, chunk)
                times[stage] = times[stage]._replace(backward=times[stage].backward + extra)
        return times

    def excess(self, cuts: Cuts) -> int:
        """Bytes over the limits, all ranks together, with everything computed again that may be."""
        over = 0
        for rank, of in enumerate(self.case.rank_spans(cuts)):
            if self.choice(rank, of) is None:
                over += max(self.knapsacks.fewest_bytes(rank, of) - self.case.limits[rank], 1)
        return over
