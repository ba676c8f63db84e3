"""What holds a plan back, and what more memory on one pipeline stage would buy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from undertow.planner.memory.model import GB
from undertow.planner.tuner.case import Case
from undertow.planner.tuner.descent import descend, even_cuts
from undertow.planner.tuner.enumeration import enumerate_layouts
from undertow.planner.tuner.trials import Trial, Trials

STEPS_GB = (1, 2, 4, 8, 16, 32, 64)
ROOM_GB = (8, 16, 32)
_LONG = 2048  # operations of a schedule, beyond which a search for each rank takes too long
_SHARE = 0.4  # of the usual work, in a search with other limits
_NOTICED = 1e-9  # share of an iteration below which nothing was gained


class StagePrice(NamedTuple):
    """Shadow price of memory on a pipeline rank: the first `gb` more (of `STEPS_GB`, on that rank alone) that make an
    iteration `seconds` shorter, by another layout or fewer layers computed again. Zeros if none do."""

    rank: int
    gb: int
    seconds: float

    @property
    def seconds_per_gb(self) -> float:
        """Seconds of an iteration for each GB."""
        return self.seconds / self.gb if self.gb else 0.0


class RoomPrice(NamedTuple):
    """What so many GB more on every GPU save of an iteration, in seconds."""

    gb: int
    seconds: float


class Bound(NamedTuple):
    """The binding constraint in a sentence, the seconds without any limit of memory, the price on each rank, and that
    of room on all (`ROOM_GB`)."""

    sentence: str
    unlimited_seconds: float
    prices: tuple[StagePrice, ...]
    room: tuple[RoomPrice, ...]


def bound_of(trials: Trials, best: Trial, proven: bool) -> Bound:
    """What holds the best layout of a case back: solved again with other limits, where it is `proven` and its schedule
    not long; otherwise the prices are those of its layout. The seconds without a limit come from another search."""
    case = trials.case
    endless = 1000 * max(case.limits)
    free = _best(trials.within((endless,) * case.ranks), [best], fixed=False, kicked=True)
    unlimited = free.seconds
    prices = [StagePrice(rank, 0, 0.0) for rank in range(case.ranks)]
    if best.seconds - unlimited <= _NOTICED * best.seconds:
        return Bound(_time(case, best), best.seconds, tuple(prices), tuple(RoomPrice(gb, 0.0) for gb in ROOM_GB))

    fixed = not proven or case.order.operations > _LONG

    met = {best.cuts: best, free.cuts: free}

    def gain(rank: int, step: int) -> float:
        limits = tuple(limit + step * GB * (at == rank) for at, limit in enumerate(case.limits))
        found = _best(trials.within(limits), [best], fixed=fixed)
        met.setdefault(found.cuts, found)
        gained = best.seconds - found.seconds
        return gained if gained > _NOTICED * best.seconds else 0.0

    for rank in range(case.ranks):
        first = _first(partial(gain, rank))
        if first < len(STEPS_GB):
            prices[rank] = StagePrice(rank, STEPS_GB[first], gain(rank, STEPS_GB[first]))
    room = _room(trials, best, [*met.values()], fixed=fixed and case.chunks == 1)
    return Bound(_memory(case, best, unlimited, prices), unlimited, tuple(prices), room)


def _room(trials: Trials, best: Trial, met: list[Trial], *, fixed: bool) -> tuple[RoomPrice, ...]:
    """Prices of room on all GPUs: of the layouts `met` so far, and of a search around them. More never saves less."""
    prices, known = [], met
    for gb in ROOM_GB:
        found = _best(trials.within(tuple(limit + gb * GB for limit in trials.case.limits)), known, fixed=fixed)
        known = [found, *known]
        saved = max([best.seconds - found.seconds, *(price.seconds for price in prices)])
        prices.append(RoomPrice(gb, saved if saved > _NOTICED * best.seconds else 0.0))
    return tuple(prices)


def _best(trials: Trials, known: Sequence[Trial], *, fixed: bool, kicked: bool = False) -> Trial:
    """The best within limits that hold the first of `known`: of these layouts alone, where `fixed`, or of others too.
    With more room the same layout may compute fewer layers again."""
    again = [trial for trial in (trials.trial(each.cuts) for each in known) if trial]
    least = min([known[0], *again], key=lambda trial: trial.order)
    if fixed:
        found = []
    elif trials.case.chunks > 1:
        starts = [least.cuts, *([even_cuts(trials.case)] if kicked else [])]
        found = descend(trials, starts, kicked=kicked, share=_SHARE)
    else:
        found = enumerate_layouts(trials, 1, known=[least])[0]
    return min([least, *found], key=lambda trial: trial.order)


def _first(buys: Callable[[int], float]) -> int:
    """The first of `STEPS_GB` that buys something, by halving: more room never buys less."""
    low, high = 0, len(STEPS_GB)
    if not buys(STEPS_GB[-1]):
        return high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if buys(STEPS_GB[middle]) else (middle + 1, high)
    return low


def _time(case: Case, best: Trial) -> str:
    work = [
        sum(float(time.forward + time.backward) for time in map(case.time, of)) + choice.seconds
        for of, choice in zip(case.rank_spans(best.cuts), best.choices, strict=True)
    ]
    slowest = max(range(case.ranks), key=work.__getitem__)
    return (
        f"time of rank {slowest}, {1e3 * work[slowest]:.0f} ms a microbatch: more memory buys nothing, "
        "and no other layout is faster"
    )


def _memory(case: Case, best: Trial, unlimited: float, prices: list[StagePrice]) -> str:
    dear = [price.rank for price in prices if price.gb]
    buys = f"without a limit an iteration would take {unlimited:.3f} s instead of {best.seconds:.3f} s"
    if not dear:
        return f"memory of several ranks together, {max(case.limits) / GB:.1f} GB each: {buys}"
    parts = []
    for rank in dear:
        again = best.choices[rank].recompute
        told = f" with {'layers ' if again.layers else ''}{again} computed again" if again else ""
        parts.append(f"rank {rank} ({best.choices[rank].bytes / GB:.1f} of {case.limits[rank] / GB:.1f} GB{told})")
    return f"memory of {', '.join(parts)}: {buys}"
