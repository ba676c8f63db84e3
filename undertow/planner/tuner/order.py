"""A schedule prepared for a search: who waits for whom, and what each rank holds at its worst moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from undertow.planner.pipeline.schedules import Pace, Schedule, ScheduleName, build_schedule, needs

_PACK, _MANY, _FEWER = 8, 6, 4  # microbatches at least of a pack, and the packs that are simulated

Counts = tuple[int, ...]
"""Microbatches of each chunk of a rank at one moment."""


class Step(NamedTuple):
    """One operation: its rank, and where its duration stands among three a stage (forward, backward, weights)."""

    rank: int
    duration: int
    source: int
    """The step on another rank that ends before, or the number of all steps."""


@dataclass(frozen=True)
class Order:
    """A schedule with what follows from it alone, the same for every layout."""

    schedule: Schedule

    @cached_property
    def operations(self) -> int:
        """Of all ranks: what a simulation takes is in proportion."""
        return sum(len(order) for order in self.schedule.orders)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage."""
        plan = self.schedule
        found = {plan.stage(rank, chunk): rank for rank in range(plan.ranks) for chunk in range(plan.chunks)}
        return tuple(found[stage] for stage in range(plan.ranks * plan.chunks))

    @cached_property
    def in_flight(self) -> tuple[tuple[Counts, ...], ...]:
        """For each rank the most microbatches it holds of its chunks at one moment: every count that none exceeds.

        Where the schedule splits the backward pass, those of each chunk that wait for their weight gradients follow.
        """
        split, chunks, found = self.schedule.split, self.schedule.chunks, []
        for order in self.schedule.orders:
            now, seen = [0] * (2 * chunks if split else chunks), set()
            for kind, _, chunk in order:
                now[chunk] += kind == "F"
                seen.add(tuple(now))
                now[chunk] -= kind == "B"
                if split:
                    now[chunks + chunk] += (kind == "B") - (kind == "W")
            found.append(_highest(seen))
        return tuple(found)

    @cached_property
    def program(self) -> tuple[Step, ...]:
        """All operations in an order in which each comes after what it needs; what it needs of its own rank is earlier
        there in any case."""
        plan, last = self.schedule, self.schedule.ranks * self.schedule.chunks - 1
        at: dict[tuple[str, int, int], int] = {}
        steps: list[Step] = []
        done = [0] * plan.ranks
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(plan.orders):
                while done[rank] < len(order):
                    kind, n, chunk = order[done[rank]]
                    stage = plan.stage(rank, chunk)
                    wanted = needs(kind, stage, last)
                    if any((*source, n) not in at for source in wanted):
                        break
                    sources = [at[(*source, n)] for source in wanted if self.rank_of[source[1]] != rank]
                    at[kind, stage, n] = len(steps)
                    steps.append(Step(rank, 3 * stage + "FBW".index(kind), *(sources or [self.operations])))
                    done[rank] += 1
                    moved = True
        return tuple(steps)

    def ends(self, lasting: Sequence[float], transfer: float) -> list[float]:
        """When each rank ends, of operations that last so long (three a stage)."""
        program, free = self.program, [0.0] * self.schedule.ranks
        arrived = [0.0] * (len(program) + 1)
        for number, (rank, duration, source) in enumerate(program):
            start = free[rank]
            if arrived[source] > start:
                start = arrived[source]
            free[rank] = end = start + lasting[duration]
            arrived[number] = end + transfer
        return free


def simulated(ranks: int, microbatches: int) -> tuple[int, ...]:
    """Numbers of microbatches that a search simulates: all, or two smaller multiples of the ranks where that is many.

    By then a pipeline is in its steady state: each further pack of microbatches takes as long as the one before.
    """
    pack = ranks * -(-_PACK // ranks)
    return (microbatches,) if microbatches <= _MANY * pack else (_MANY * pack, _FEWER * pack)


def _highest(counts: set[Counts]) -> tuple[Counts, ...]:
    kept: list[Counts] = []
    for count in sorted(counts, reverse=True):  # what exceeds a count comes before it
        if not any(all(a >= b for a, b in zip(more, count, strict=True)) for more in kept):
            kept.append(count)
    return tuple(reversed(kept))


@lru_cache(maxsize=64)
def order_of(name: ScheduleName, ranks: int, microbatches: int, chunks: int, pace: Pace) -> Order:
    """The order of a schedule, built once: cases that share weights otherwise have the same."""
    return Order(build_schedule(name, ranks, microbatches, chunks, pace))
