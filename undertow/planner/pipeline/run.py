"""A pipeline as a whole: a layout under a schedule, checked and run."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.config.errors import ConfigError
from undertow.config.layout import Layout, check_layout
from undertow.planner.memory.recompute import NONE, Recompute
from undertow.planner.pipeline.schedules import (
    EQUAL,
    Schedule,
    ScheduleName,
    build_schedule,
    placement_of,
    splits_backward,
)
from undertow.planner.pipeline.timeline import StageBytes, StageTime, Time, Timeline, simulate
from undertow.planner.timing.costs import ModelTimes, stage_times


def schedule_for(
    layout: Layout,
    times: ModelTimes,
    name: ScheduleName,
    ranks: int,
    microbatches: int,
    recompute: Recompute = NONE,
) -> Schedule:
    """The schedule that a layout asks for on `ranks` pipeline ranks.

    Raises `ConfigError` where the layout does not suit the model, the ranks or the schedule, and for recomputed layers
    under a schedule that splits the backward pass: what a weight gradient still reads would not be freed.
    """
    chunks = check_layout(layout, times.config, ranks, placement_of(name))
    if recompute and splits_backward(name):
        what = f"{recompute}" if recompute.modules else f"layers {recompute}"
        raise ConfigError(
            f"schedule {name} splits the backward pass, so {what} cannot be recomputed; "
            "recompute none, or use 1f1b or interleaved"
        )
    return build_schedule(name, ranks, microbatches, chunks, times.pace if name == "zbv" else EQUAL)


def pipeline_timeline(
    layout: Layout,
    times: ModelTimes,
    *,
    ranks: int,
    microbatches: int,
    schedule: ScheduleName = "1f1b",
    recompute: Recompute = NONE,
    held: Sequence[StageBytes] | None = None,
    transfer: Time = 0,
) -> Timeline:
    """One iteration of a model laid out over `ranks` pipeline ranks; see `schedule_for`, `stage_times`, `simulate`."""
    order = schedule_for(layout, times, schedule, ranks, microbatches, recompute)
    return simulate(order, stage_times(times, layout, recompute), held, transfer=transfer)


def approximate_seconds(stages: Sequence[StageTime], microbatches: int) -> Time:
    """1F1B over unequal stages without simulation: `(m - 1) max c + sum c`, c a stage's forward and backward."""
    each = [stage.forward + stage.backward for stage in stages]
    return (microbatches - 1) * max(each) + sum(each)
