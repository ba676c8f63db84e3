"""The fastest pipeline that fits: layout, schedule, what is computed again, and the widths of an outer grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from undertow.config.errors import ConfigError, DoesNotFit
from undertow.config.layout import Layout
from undertow.planner.memory.model import GB, Memory
from undertow.planner.options import Granularity
from undertow.planner.pipeline.schedules import splits_backward
from undertow.planner.task import Task
from undertow.planner.tuner.candidate import Candidate, candidate_of
from undertow.planner.tuner.case import Case, Cuts, spans
from undertow.planner.tuner.descent import descend, even_cuts
from undertow.planner.tuner.grid import Grid, cases_of, ideal, promise
from undertow.planner.tuner.knapsack import Knapsacks
from undertow.planner.tuner.price import RoomPrice, StagePrice, bound_of
from undertow.planner.tuner.search import search
from undertow.planner.tuner.trials import Trial, Trials

_ATTEMPTS = 4  # searches with a lower limit, where memory turned out higher than the search had it
_GLANCE = 0.05  # share of the usual work in a first look at a case with several stages a rank
_USUAL = 0.4  # share in the second look
_FINALISTS = 2  # cases that are looked at again, with the usual work
_NEAR = 1.03  # times the best of the first look, to be a finalist
_TRUST = 0.98  # share of a guess of seconds that is taken for a bound: real stages are less even than the guess
_SAME = 1e-9  # share by which seconds in full differ from those of the search at most, for a proof to hold
_ROOM = 1.1  # times all memory; even stages are a guess of how bytes are spread

Progress = Callable[[int, int], None]
"""Called with the cases that are done, and how many there are."""


@dataclass(frozen=True)
class Found:
    """The best candidate and the next best; what holds it back, in a sentence; what a GB more on each rank would buy.

    `searched` are the cases that were looked into, of so many `cases`; `room` is what more on every GPU would buy.
    """

    best: Candidate
    runners_up: tuple[Candidate, ...]
    binding: str
    unlimited_seconds: float
    prices: tuple[StagePrice, ...]
    searched: tuple[Case, ...]
    cases: int
    room: tuple[RoomPrice, ...] = ()

    def joined(self, other: Found) -> Found:
        """With another search of the same run: the better of the two, runners-up from both."""
        first, second = sorted((self, other), key=lambda each: each.best.order)
        others = sorted((*first.runners_up, second.best, *second.runners_up), key=lambda each: each.order)
        return replace(
            first,
            runners_up=tuple(others[: max(len(first.runners_up), len(second.runners_up))]),
            unlimited_seconds=min(first.unlimited_seconds, second.unlimited_seconds),
            searched=(*self.searched, *other.searched),
            cases=self.cases + other.cases,
        )


def tune(
    searches: Sequence[tuple[Task, Grid]],
    limit: int,
    *,
    granularity: Granularity = "layer",
    keep: int = 3,
    progress: Progress | None = None,
    start: tuple[Task, Layout] | None = None,
    below: float = float("inf"),
) -> Found:
    """The fastest candidate of grids around tasks of one global batch, each GPU within `limit` bytes.

    The layout of `start` is always looked at; what is slower than `below` seconds may be left out. Raises `DoesNotFit`
    where nothing fits, and `ConfigError` where no combination of the grid can be, with the reason of the first.
    """
    if limit < 1:
        raise ConfigError(f"limit is {limit} bytes; allowed: at least 1")
    refused: list[ConfigError] = []
    cases = [case for start, grid in searches for case in cases_of(start, grid, limit, granularity, refused)]
    known = None
    if start is not None:
        task, layout = start
        limits, times = (limit,) * task.geometry.pipeline, task.times
        known = (
            Case(
                times,
                task.memory_model,
                task.microbatches,
                limits,
                task.schedule,
                task.chunks,
                times.transfer,
                granularity,
            ),
            layout,
        )
    if not cases:
        raise refused[0] if refused else ConfigError("the grid is empty; give at least one of every width and schedule")
    return tune_cases(cases, keep, progress=progress, start=known, below=below)


def tune_cases(
    cases: Sequence[Case],
    keep: int = 3,
    *,
    progress: Progress | None = None,
    start: tuple[Case, Layout] | None = None,
    below: float = float("inf"),
) -> Found:
    """The fastest candidate of several cases of one global batch, and the `keep` next ones.

    Cases that could not beat what is found even if no rank ever waited are skipped. With several cases of several
    stages a rank there is a short look at each, and the best are searched once more. Raises `DoesNotFit`. For `start`
    and `below` see `tune`.
    """
    if all(_overfull(case) for case in cases):
        raise _nothing_fits(cases)
    contest = _Contest(keep, below)
    if start is not None:
        contest.start(*start)
    order = sorted(cases, key=_preferred)
    many = sum(case.chunks > 1 for case in cases) > _FINALISTS
    for done, case in enumerate(order, 1):
        contest.enter(Trials.of(case), _GLANCE if many and case.chunks > 1 else 1.0)
        if progress:
            progress(done, len(order))
    if not contest.found:
        raise _nothing_fits(cases)
    if many:
        contest.decide()
    contest.confirm()
    best, others = contest.found[0], contest.found[1:]
    bound = bound_of(best.trials, best.trial, best.candidate.proven)
    return Found(
        best.candidate,
        tuple(each.candidate for each in others),
        bound.sentence,
        bound.unlimited_seconds,
        bound.prices,
        tuple(trials.case for trials in contest.searched),
        len(cases),
        bound.room,
    )


def glance(known: Sequence[Trials], limit: int) -> Candidate | None:
    """The fastest candidate within another limit, by a short look at each case; None where nothing fits."""
    contest = _Contest(0)
    for trials in sorted(known, key=lambda each: _preferred(each.case)):
        contest.enter(trials.within((limit,) * trials.case.ranks), _GLANCE)
    return contest.found[0].candidate if contest.found else None


def _preferred(case: Case) -> tuple[float, int]:
    return promise(case), -case.memory.m.geometry.expert


class _Entry(NamedTuple):
    candidate: Candidate
    trials: Trials
    trial: Trial


@dataclass
class _Contest:
    """What is found so far, best first, and the cases that were searched."""

    keep: int
    ceiling: float = float("inf")
    found: list[_Entry] = field(default_factory=list)
    searched: list[Trials] = field(default_factory=list)

    @property
    def below(self) -> float:
        """Seconds that a layout must beat to be kept."""
        return self.found[self.keep].candidate.seconds if len(self.found) > self.keep else self.ceiling

    def start(self, case: Case, layout: Layout) -> None:
        """Look at one layout of a case, if it fits."""
        trials, cuts = Trials.of(case), case.cuts(layout)
        if cuts is None or len(cuts) != case.stages or (trial := trials.trial(cuts)) is None:
            return
        candidate = candidate_of(case, trial, False)
        if _excess(case, candidate.memory) <= 0:
            self.found = [_Entry(candidate, trials, trial)]

    def enter(self, trials: Trials, share: float) -> None:
        """Search a case, unless it cannot win."""
        case = trials.case
        if ideal(case) >= self.below or _TRUST * promise(case) >= self.below or case.stages > len(case.parts):
            return
        if _hopeless(case):
            return
        if any(_dominates(other, trials) for other in self.searched):
            return
        self.searched.append(trials)
        self._search(trials, share)

    def decide(self) -> None:
        """Search the best cases of several stages a rank once more, with the usual work."""
        best: dict[int, _Entry] = {}
        for entry in self.found:
            best.setdefault(id(entry.trials.knapsacks), entry)
        near = _NEAR * self.found[0].candidate.seconds
        for entry in [e for e in best.values() if e.candidate.chunks > 1 and e.candidate.seconds <= near][:_FINALISTS]:
            self._search(entry.trials, _USUAL, self._unlimited(entry))

    def confirm(self) -> None:
        """Simulate what was found in full, where that was too long for the search."""
        for at, (candidate, trials, trial) in enumerate(self.found):
            if trials.case.shorter:
                exact = trials.exact(trial)
                told = abs(exact.seconds - trial.seconds) <= _SAME * exact.seconds
                candidate = replace(candidate, seconds=exact.seconds, proven=candidate.proven and told)
                self.found[at] = _Entry(candidate, trials, exact)
        self.found.sort(key=lambda each: each.candidate.order)

    def _unlimited(self, entry: _Entry) -> list[Cuts]:
        """The best layout around a candidate's if memory had no limit: another start."""
        case = entry.trials.case
        endless = entry.trials.within((1000 * max(case.limits),) * case.ranks)
        found = descend(endless, [entry.trial.cuts], kicked=False, share=_USUAL)
        return [min(found, key=lambda trial: trial.order).cuts] if found else []

    def _search(self, trials: Trials, share: float, also: Sequence[Cuts] = ()) -> None:
        entries = _entries(trials, self.keep + 1, share, self.below, also)
        known = {each.candidate.key: each for each in (*self.found, *entries)}
        self.found = sorted(known.values(), key=lambda each: each.candidate.order)[: self.keep + 1]


def _hopeless(case: Case) -> bool:
    """Whether all ranks together have too little memory for their state, and for what microbatches keep with all
    computed again that may be. Needs no schedule: those that are long take long to build."""
    ranks, saved = case.ranks, case.memory.saved
    split = splits_backward(case.schedule)
    kept = sum(full if split else min(full, least) for full, least in zip(saved.full, saved.recomputed, strict=True))
    held = min(case.microbatches, ranks if case.schedule == "zbv" else (ranks + 1) / 2)
    static = sum(case.static_bytes(rank, [span]) for rank, span in enumerate(spans(even_cuts(case, ranks))))
    return static + held * kept > _ROOM * sum(case.limits)


def _dominates(other: Trials, trials: Trials) -> bool:
    """Whether another case, alike but for the sharing of weights, is nowhere slower and nowhere larger."""
    a, b = other.case, trials.case
    if (a.schedule, a.chunks, a.ranks, a.microbatches) != (b.schedule, b.chunks, b.ranks, b.microbatches):
        return False
    if any(x > y for one, two in zip(a.part_times, b.part_times, strict=True) for x, y in zip(one, two, strict=True)):
        return False
    ranks = list(enumerate(b.rank_spans(even_cuts(b))))
    return all(other.knapsacks.bytes(rank, of) <= trials.knapsacks.bytes(rank, of) for rank, of in ranks)


def _entries(trials: Trials, keep: int, share: float, below: float, also: Sequence[Cuts] = ()) -> list[_Entry]:
    """The best layouts of a case that fit by the memory model itself."""
    case = trials.case
    for _ in range(_ATTEMPTS):
        result = search(trials, keep, share=share, below=below, also=also)
        entries = [_Entry(candidate_of(case, trial, result.proven), trials, trial) for trial in result.trials]
        excess = [_excess(case, entry.candidate.memory) for entry in entries]
        fitting = [entry for entry, over in zip(entries, excess, strict=True) if over <= 0]
        if fitting or not entries:
            return fitting
        trials = trials.within(tuple(limit - min(excess) for limit in trials.case.limits))
    return []


def _excess(case: Case, memory: Memory) -> int:
    """Bytes that the rank furthest over its limit is over it."""
    return max(stage.total_bytes - limit for stage, limit in zip(memory.stages, case.limits, strict=True))


def _overfull(case: Case) -> bool:
    """Whether the state alone exceeds the limits, shared out evenly: the fullest rank has no less."""
    return case.memory.least_state_bytes > max(case.limits)


def _nothing_fits(cases: Sequence[Case]) -> DoesNotFit:
    """How far from fitting the nearest case is, evenly laid out."""

    def fullest(case: Case) -> tuple[int, int]:
        known, even = Knapsacks(case), even_cuts(case)
        return max((known.fewest_bytes(rank, of), -rank) for rank, of in enumerate(case.rank_spans(even)))

    possible = [case for case in cases if case.stages <= len(case.parts)]
    if not possible:
        return DoesNotFit(f"{cases[0].stages} stages are more than the {len(cases[0].parts)} parts of the model")
    (size, rank), case = min(((fullest(case), case) for case in possible), key=lambda pair: pair[0])
    g = case.memory.m.geometry
    return DoesNotFit(
        f"no layout fits {_size(case.limits[0])} a GPU: the nearest, evenly laid out under {case.schedule} on "
        f"tensor {g.tensor}, pipeline {g.pipeline}, expert {g.expert} and context {g.context}, takes at least "
        f"{_size(size)} on rank {-rank} with every layer computed again that may be; take more GPUs, a wider "
        "pipeline or expert width, or a smaller state profile"
    )


def _size(size: int) -> str:
    return f"{size / GB:.1f} GB" if size >= 10 * GB else f"{size / GB:.4f} GB"
