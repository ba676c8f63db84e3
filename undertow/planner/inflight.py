"""Microbatches that each rank holds at the worst moment of a schedule."""

from __future__ import annotations

from undertow.planner.activations import SavedTable
from undertow.planner.layout import Layout
from undertow.planner.memory import Held
from undertow.planner.parameters import Stage
from undertow.planner.schedules import Schedule


def held_by_schedule(
    schedule: Schedule, layout: Layout, saved: SavedTable, recompute: frozenset[int] = frozenset()
) -> tuple[tuple[Held, ...], ...]:
    """For each rank its stages, and the microbatches of each at the moment when together they hold most bytes.

    The moment follows from the order of operations alone. A microbatch is held from its forward pass to the end of its
    backward pass; where the schedule splits that, to the end of its weight gradient, which is an upper bound.
    """
    last = "W" if schedule.split else "B"
    found = []
    for rank, order in enumerate(schedule.orders):
        stages = [Stage.of(layout, schedule.stage(rank, chunk)) for chunk in range(schedule.chunks)]
        sizes = [saved.stage(stage, recompute) for stage in stages]
        now, worst, most = [0] * len(stages), [0] * len(stages), -1
        for operation in order:
            if operation.kind == "F":
                now[operation.chunk] += 1
            reached = sum(count * size.total for count, size in zip(now, sizes, strict=True))
            if operation.kind == "B":
                reached += sizes[operation.chunk].transient
            if reached > most:
                worst, most = [*now], reached
            if operation.kind == last:
                now[operation.chunk] -= 1
        found.append(tuple(Held(stage, count) for stage, count in zip(stages, worst, strict=True)))
    return tuple(found)
