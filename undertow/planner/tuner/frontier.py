"""Seconds of an iteration against the memory that a GPU may take: the tuner asked again under other limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from undertow.planner.tuner.candidate import Candidate
from undertow.planner.tuner.case import Case
from undertow.planner.tuner.descent import even_cuts
from undertow.planner.tuner.grid import promise
from undertow.planner.tuner.trials import Trials
from undertow.planner.tuner.tune import glance

POINTS = 9
_ENDLESS = 10**15


def frontier_of(cases: Sequence[Case], best: Sequence[Case]) -> list[tuple[int, Candidate]]:
    """Limits in bytes from the smallest that fits to one that does not bind, each with its fastest candidate.

    There is a short look at the cases of the `best` candidates, that of least memory, and the most promising of each
    schedule.
    """
    known = [Trials.of(case) for case in _chosen([case for case in cases if case.stages <= len(case.parts)], best)]
    unlimited = glance(known, _ENDLESS)
    if unlimited is None:
        return []
    low, high = min(map(_fewest, known)), unlimited.peak_bytes
    points = [(limit, glance(known, limit)) for limit in _limits(low, high)]
    found = [(limit, candidate) for limit, candidate in points if candidate]
    return list(_improving([*found, (high, unlimited)]))


def _chosen(cases: list[Case], best: Sequence[Case]) -> list[Case]:
    chosen = {id(case): case for case in best}
    for schedule in dict.fromkeys(case.schedule for case in cases):
        case = min((case for case in cases if case.schedule == schedule), key=promise)
        chosen[id(case)] = case
    smallest = min(cases, key=lambda case: _fewest(Trials.of(case)))
    return [*(chosen | {id(smallest): smallest}).values()]


def _limits(low: int, high: int) -> Iterator[int]:
    for n in range(POINTS - 1):
        yield low + max(0, high - low) * n // (POINTS - 1)


def _improving(found: list[tuple[int, Candidate]]) -> Iterator[tuple[int, Candidate]]:
    """More room never takes longer: what fits a lower limit fits a higher one."""
    best = found[0][1]
    for limit, candidate in found:
        best = min(best, candidate, key=lambda each: each.order)
        yield limit, best


def _fewest(trials: Trials) -> int:
    """Bytes of the fullest rank of even stages, all computed again that may be."""
    case = trials.case
    return max(trials.knapsacks.fewest_bytes(rank, of) for rank, of in enumerate(case.rank_spans(even_cuts(case))))
