"""The outer grid of a search: widths, micro-batches and schedules, as the cases that they give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from undertow.config.errors import ConfigError
from undertow.planner.geometry import Batch, build_geometry, check_batch, check_model
from undertow.planner.memory.activations import check_pool
from undertow.planner.options import Granularity
from undertow.planner.pipeline.schedules import ScheduleName, check_schedule
from undertow.planner.task import Task
from undertow.planner.tuner.case import Case

DEEPEST, WIDEST = 16, 8
"""Largest widths that are tried unasked: of the pipeline, and of expert, tensor and context parallelism."""

SCHEDULES: tuple[tuple[ScheduleName, int], ...] = (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2))
"""Schedules with stages a rank that are tried unasked."""

_BUBBLE = {"1f1b": 1.0, "interleaved": 1.0, "zb-h1": 1 / 3, "zbv": 1 / 6}


@dataclass(frozen=True)
class Grid:
    """Widths, micro-batches and schedules (with stages a rank) to try; combinations that cannot be are left out."""

    pipeline: tuple[int, ...] = (1, 2, 4, 8, 16)
    expert: tuple[int, ...] = (8, 4, 2, 1)
    tensor: tuple[int, ...] = (1,)
    context: tuple[int, ...] = (1,)
    micro_batch: tuple[int, ...] = (1,)
    schedules: tuple[tuple[ScheduleName, int], ...] = SCHEDULES


def open_grid(gpus: int, layers: int) -> Grid:
    """All that is tried where a user leaves everything open, but for tensor and context parallelism."""
    depths = tuple(width for width in range(1, min(gpus, layers, DEEPEST) + 1) if gpus % width == 0)
    widths = tuple(width for width in range(WIDEST, 0, -1) if gpus % width == 0)
    return Grid(depths, widths, micro_batch=(1, 2))


def cases_of(
    start: Task, grid: Grid, limit: int, granularity: Granularity, refused: list[ConfigError]
) -> Iterator[Case]:
    """The cases of a grid, alike to `start` in all that the grid leaves alone, each GPU within `limit` bytes.

    What cannot be is left out, its reason added to `refused`. Cases of one geometry share their seconds and bytes.
    """
    for task in _tasks(start, grid, refused):
        limits = (limit,) * task.geometry.pipeline
        times, memory, count = task.times, task.memory_model, task.microbatches
        for schedule, chunks in grid.schedules:
            if task.geometry.pipeline == 1 and schedule != "1f1b" and ("1f1b", 1) in grid.schedules:
                continue
            try:
                check_schedule(schedule, task.geometry.pipeline, count, chunks)
            except ConfigError as error:
                refused.append(error)
            else:
                yield Case(times, memory, count, limits, schedule, chunks, times.transfer, granularity)


def _tasks(start: Task, grid: Grid, refused: list[ConfigError]) -> Iterator[Task]:
    config, m, gpus = start.config, start.microbatch, start.geometry.gpus
    widths = product(grid.pipeline, grid.expert, grid.tensor, grid.context, grid.micro_batch)
    for pipeline, expert, tensor, context, rows in widths:
        batch = Batch(start.batch.size, start.batch.sequence_length, rows)
        try:
            geometry = build_geometry(
                gpus,
                tensor=tensor,
                pipeline=pipeline,
                expert=expert,
                context=context,
                shard=start.geometry.shard or None,
            )
            check_model(config, geometry)
            check_batch(config, geometry, batch)
            if m.implementation == "primus":
                check_pool(config, geometry)
        except ConfigError as error:
            refused.append(error)
            continue
        objective = replace(m.objective, balance_rows=rows if m.objective.balance_rows else 0)
        microbatch = replace(m, geometry=geometry, batch=batch, objective=objective)
        yield replace(start, microbatch=microbatch, schedule="1f1b", chunks=1)


def ideal(case: Case) -> float:
    """Seconds if no rank ever waited and nothing were computed again."""
    work = sum(case.microbatches * float(time.forward + time.backward) + float(time.step) for time in case.part_times)
    return work / case.ranks


def promise(case: Case) -> float:
    """A guess of its seconds: stages are equal, and fill and drain as the schedule does."""
    waits = _BUBBLE[case.schedule] * (case.ranks - 1) / (case.microbatches * case.chunks)
    return ideal(case) * (1 + waits)
