"""Good layouts where there are too many to look at: from a few starts, one part at a time to another stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from undertow.planner.tuner.case import Case, Cuts
from undertow.planner.tuner.trials import Trial, Trials

MOST_OPERATIONS = 1_500_000  # simulated in all, about a second
_AT_ONCE = 200_000  # operations simulated for the neighbours of one layout
_FEWEST = 24  # neighbours that are looked at in any case
_REPAIRS, _MORE_REPAIRS = 2000, 4000  # neighbours of layouts that do not fit: in any case, and for the whole budget
_HOPELESS = 1.03  # times what is looked for: descent from there is left out
FEW = 0.2  # share of the budget up to which one start is enough
_MOST_KICKS = 100
_KICKS = 3  # random moves that leave a layout none of whose neighbours is better


@dataclass
class _Budget:
    """Work that is left: layouts to simulate, and neighbours of layouts that do not fit."""

    simulations: int
    repairs: int


def descend(
    trials: Trials,
    starts: Iterable[Cuts],
    *,
    seed: int = 0,
    kicked: bool = True,
    share: float = 1.0,
    below: float = float("inf"),
) -> list[Trial]:
    """Trials of the layouts that were met, in no order.

    From each start a better neighbour is taken until there is none; then, where `kicked`, from the best layout moved
    at random, until a `share` of the budget of simulated operations is spent; not if all are a good deal slower than
    `below`. Layouts over the limits first go where fewer bytes are over. The same arguments give the same layouts.
    """
    case, met, random = trials.case, dict[Cuts, Trial](), Random(seed)
    budget = _Budget(int(share * MOST_OPERATIONS) // case.order.operations, _REPAIRS + int(share * _MORE_REPAIRS))
    for start in dict.fromkeys(starts):
        if case.allows(start) and trials.plain_seconds(start) < _HOPELESS * below and (share > FEW or not met):
            _down(trials, start, met, budget)
    known = set(met)
    kicked = kicked and any(trial.seconds < _HOPELESS * below for trial in met.values())
    for _ in range(_MOST_KICKS if kicked else 0):
        if budget.simulations <= 0:
            break
        start = min(met.values(), key=lambda trial: (round(trial.seconds, 10), trial.cuts)).cuts
        for _ in range(random.randint(1, _KICKS)):
            moves = [cuts for cuts in neighbours(start, len(case.parts)) if case.allows(cuts)]
            start = random.choice(moves) if moves else start
        if start not in known and trials.excess(start) == 0:
            known.add(start)
            _down(trials, start, met, budget)
    return list(met.values())


def _down(trials: Trials, start: Cuts, met: dict[Cuts, Trial], budget: _Budget) -> None:
    """Go from a start to where no neighbour is better, and note what fits on the way."""
    now, over = trials.trial(start), trials.excess(start)
    if now:
        met[start] = now
    improved = True
    while improved and budget.simulations > 0:
        improved = False
        for cuts in _promising(trials, start, now):
            if now is None:
                budget.repairs -= 1
                if budget.repairs < 0:
                    return
                if (less := trials.excess(cuts)) >= over:
                    continue
                over = less
            else:
                budget.simulations -= 1
                if trials.plain_seconds(cuts) > now.seconds:
                    continue
            if (trial := met.get(cuts)) is None:
                budget.simulations -= now is not None
                trial = trials.trial(cuts)
            if trial:
                met[cuts] = trial
            if now is None or (trial and trial.order < now.order):
                start, now, improved = cuts, trial, True
                break


def _promising(trials: Trials, start: Cuts, now: Trial | None) -> list[Cuts]:
    """Neighbours that may be better, those of the lowest bound first where a simulation is long."""
    case = trials.case
    found = [cuts for cuts in neighbours(start, len(case.parts)) if case.allows(cuts)]
    if now is None:
        return found
    bounds = {cuts: trials.least_seconds(cuts) for cuts in found}
    found = [cuts for cuts in found if bounds[cuts] <= now.seconds]
    most = max(_FEWEST, _AT_ONCE // case.order.operations)
    return found if len(found) <= most else sorted(found, key=bounds.__getitem__)[:most]


def neighbours(cuts: Cuts, count: int) -> Iterator[Cuts]:
    """One part moved from a stage to any other, by shifting the cuts between them by one."""
    for width in range(1, len(cuts)):
        for at in range(len(cuts) - width):
            for shift in (-1, 1):
                moved = (*cuts[:at], *(cut + shift for cut in cuts[at : at + width]), *cuts[at + width :])
                if all(a < b for a, b in zip((0, *moved), (*moved, count + 1), strict=True)):
                    yield moved


def even_cuts(case: Case, stages: int | None = None) -> Cuts:
    """Cuts whose slowest stage is about as fast as can be, by halving: a start. Into the stages of the case, unless
    another number is given."""
    count = case.stages if stages is None else stages
    parts = [float(time.forward + time.backward) for time in case.part_times]
    low, high = max(parts), sum(parts)
    for _ in range(40):
        middle = (low + high) / 2
        if len(_filled(parts, middle, count)) <= count:
            high = middle
        else:
            low = middle
    return _filled(parts, high * (1 + 1e-9), count)


def _filled(parts: Sequence[float], most: float, stages: int) -> Cuts:
    """Cuts that fill each stage up to `most` seconds, but leave a part for each stage to come."""
    cuts: list[int] = []
    now, first = 0.0, 0
    for end, seconds in enumerate(parts):
        left = stages - len(cuts) - 1
        if end > first and (now + seconds > most or len(parts) - end <= left):
            cuts.append(end)
            first, now = end, 0.0
        now += seconds
    return (*cuts, len(parts))
