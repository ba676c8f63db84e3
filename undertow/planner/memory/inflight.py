"""Microbatches that each rank holds at the worst moment of a schedule, and the bytes of one."""

from __future__ import annotations

from undertow.config.layout import Layout
from undertow.planner.memory.model import Held
from undertow.planner.memory.parameters import Stage
from undertow.planner.memory.recompute import NONE, Recompute
from undertow.planner.memory.saved import SavedTable
from undertow.planner.pipeline.schedules import Schedule
from undertow.planner.pipeline.timeline import StageBytes, changes


def stage_bytes(saved: SavedTable, stage: Stage, split: bool, recompute: Recompute = NONE) -> StageBytes:
    """What one microbatch holds of a stage; where the schedule splits the backward pass, until its weight gradient."""
    kept = saved.stage(stage, recompute)
    if not split:
        return StageBytes(kept.total, 0, kept.transient)
    deferred = saved.deferred(stage)
    return StageBytes(kept.total - deferred.inputs, deferred.inputs, deferred.transient, deferred.gradients)


def held_by_1f1b(layout: Layout, microbatches: int) -> tuple[tuple[Held, ...], ...]:
    """The same of 1F1B with one stage a rank, without going through its operations: a rank starts as many microbatches
    as there are ranks from itself to the last, and then ends one before each next."""
    ranks = len(layout.stages)
    return tuple((Held(Stage.of(layout, rank), min(microbatches, ranks - rank)),) for rank in range(ranks))


def held_by_schedule(
    schedule: Schedule, layout: Layout, saved: SavedTable, recompute: Recompute = NONE
) -> tuple[tuple[Held, ...], ...]:
    """For each rank its stages, and the microbatches of each at the moment when together they hold most bytes.

    The moment follows from the order of operations alone. A microbatch is in flight from its forward pass to the end of
    its backward pass; where the schedule splits that, it is due from then on to the end of its weight gradient.
    """
    split, found = schedule.split, []
    for rank, order in enumerate(schedule.orders):
        stages = [Stage.of(layout, schedule.stage(rank, chunk)) for chunk in range(schedule.chunks)]
        sizes = [stage_bytes(saved, stage, split, recompute) for stage in stages]
        flying, due = [0] * len(stages), [0] * len(stages)
        now, most, worst = 0, -1, ([0] * len(stages), [0] * len(stages))
        for kind, _, chunk in order:
            at_start, at_end = changes(sizes[chunk], kind, split)
            now += at_start
            flying[chunk] += kind == "F"
            if now > most:
                most, worst = now, ([*flying], [*due])
            now += at_end
            flying[chunk] -= kind == "B"
            due[chunk] += split * ((kind == "B") - (kind == "W"))
        counts = zip(stages, *worst, strict=True)
        found.append(tuple(Held(stage, held, late if split else None) for stage, held, late in counts))
    return tuple(found)
