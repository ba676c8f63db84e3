"""From what a user says to the tuned task, layout and recomputation: what is stated stays, the rest is searched."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import get_args

from undertow.config.clusters import Pool
from undertow.config.errors import ConfigError, DoesNotFit
from undertow.planner.choice import Chosen, Options, choose, stated, usual_chunks, usual_implementation
from undertow.planner.memory.model import GB
from undertow.planner.memory.recompute import Recompute
from undertow.planner.options import Granularity
from undertow.planner.pipeline.layout import Layout
from undertow.planner.subject import MICRO_BATCH, Subject
from undertow.planner.task import Task
from undertow.planner.tuner.candidate import Candidate
from undertow.planner.tuner.frontier import frontier_of
from undertow.planner.tuner.gains import gains_of
from undertow.planner.tuner.grid import Grid, open_grid
from undertow.planner.tuner.tune import Found, Progress, tune
from undertow.planner.tuner.tuned import FrontierPoint, Tuned, Way

MARGIN = 0.05
"""Share of a GPU's memory that is left free unasked."""

_WIDER = (1, 2, 4, 8)
_MOST_CHUNKS = 4


@dataclass(frozen=True)
class Bounds:
    """What a search keeps to: `memory_limit` is in GB and None for that of the GPU, of which a share `margin` is left
    free; `granularity` says whether single modules are computed again, or whole layers alone."""

    margin: float = MARGIN
    memory_limit: float | None = None
    granularity: Granularity = "layer"

    def limit_bytes(self, pool: Pool) -> int:
        """Bytes that a GPU may take. Raises `ConfigError` for a margin, limit or granularity that cannot be."""
        if not 0 <= self.margin < 1:
            raise ConfigError(f"margin is {self.margin}; allowed: at least 0, below 1")
        if self.memory_limit is not None and not 0 < self.memory_limit < 1e9:
            raise ConfigError(f"memory limit is {self.memory_limit} GB; allowed: above 0, in units of 10^9 bytes")
        if self.granularity not in get_args(Granularity):
            raise ConfigError(f"granularity is '{self.granularity}'; allowed: {', '.join(get_args(Granularity))}")
        memory = pool.gpu.memory if self.memory_limit is None else self.memory_limit * GB
        return int(memory * (1 - self.margin))


def choose_tuned(
    subject: Subject, pool: Pool, options: Options, bounds: Bounds, progress: Progress | None = None
) -> tuple[Chosen, Tuned]:
    """The fastest way that fits, and how it was come by.

    Widths, micro-batch and schedule that the user or the recipe states are kept; layout and recomputation are always
    chosen. Tensor parallelism is tried where the plan without tuning has it, from its width on; otherwise, as context
    parallelism, only where nothing fits without. Raises `DoesNotFit` where nothing fits at all, and `ConfigError` for
    what cannot be.
    """
    for name in ("layout", "recompute"):
        if getattr(options, name) is not None:
            raise ConfigError(f"{name} with tuning: the tuner chooses the {name}; give one of the two")
    limit = bounds.limit_bytes(pool)
    start, layout, recompute = choose(subject, pool, options)
    found = _search(subject, stated(subject.run, options), start, limit, bounds, progress)
    best = found.best
    chosen = _task(start, best), best.layout, best.recompute
    return chosen, _tuned(start, _start(start, layout, recompute), found, bounds, limit)


def _search(
    subject: Subject, fixed: Options, start: Task, limit: int, bounds: Bounds, progress: Progress | None
) -> Found:
    """Without tensor and context parallelism, or with what the start has and more; with all where nothing fits."""
    grid, own = _grid(subject, fixed, start), start.geometry
    plain = _implemented(subject, fixed, start, 1)
    if fixed.tensor is not None:
        first = [(start, grid)]
    else:
        wider = tuple(width for width in _WIDER if width >= own.tensor)
        first = [(plain, grid)] + [(start, replace(grid, tensor=wider))] * (own.tensor > 1)
    try:
        return tune(first, limit, granularity=bounds.granularity, progress=progress)
    except DoesNotFit as refusal:
        wide = replace(grid, context=_WIDER) if fixed.context is None else grid
        if _open_rows(subject, fixed):
            wide = replace(wide, micro_batch=open_grid(1, 1).micro_batch)
        second = [(start if fixed.tensor is not None else plain, wide)]
        if fixed.tensor is None:
            second.append((_implemented(subject, fixed, start, _WIDER[1]), replace(wide, tensor=_WIDER[1:])))
        with suppress(DoesNotFit, ConfigError):
            return tune(second, limit, granularity=bounds.granularity, progress=progress)
        raise refusal from None


def _implemented(subject: Subject, fixed: Options, start: Task, tensor: int) -> Task:
    """The start under the implementation that is usual for such a tensor width, unless one is asked for."""
    own = start.geometry
    geometry = replace(own, tensor=tensor, data=max(1, own.data * own.tensor // tensor))
    usual = usual_implementation(subject, fixed, geometry)
    return replace(start, microbatch=replace(start.microbatch, implementation=usual))


def _grid(subject: Subject, fixed: Options, start: Task) -> Grid:
    """The open grid, with what is fixed in place of what is tried."""
    pool, name = start.geometry.gpus, start.schedule
    grid = open_grid(pool, start.config.num_hidden_layers)
    grid = replace(grid, pipeline=tuple(sorted({*grid.pipeline, start.geometry.pipeline})))
    for axis in ("pipeline", "expert", "tensor", "context"):
        if (width := getattr(fixed, axis)) is not None:
            grid = replace(grid, **{axis: (width,)})
    own = start.batch.micro_batch
    if not _open_rows(subject, fixed) or pool == 1:  # alone, what passes take together is the same by these rates
        grid = replace(grid, micro_batch=(own,))
    else:
        grid = replace(grid, micro_batch=tuple(sorted({*grid.micro_batch, own})))
    if fixed.schedule is not None:
        most = _MOST_CHUNKS if name == "interleaved" else usual_chunks(name)
        grid = replace(grid, schedules=tuple((name, n) for n in range(usual_chunks(name), most + 1)))
    return grid


def _open_rows(subject: Subject, fixed: Options) -> bool:
    """Whether nobody states a micro-batch."""
    rows = subject.run.train.micro_batch_size
    return fixed.micro_batch is None and rows in ((None,) if subject.recipe else (None, MICRO_BATCH))


def _task(start: Task, candidate: Candidate) -> Task:
    case = candidate.case
    return replace(start, microbatch=case.memory.m, schedule=case.schedule, chunks=case.chunks)


def _start(task: Task, layout: Layout, recompute: Recompute) -> Way:
    seconds, peak = float(task.timeline(layout, recompute).seconds), task.memory(layout, recompute).peak
    return Way(layout, task.schedule, task.geometry, task.batch, recompute, seconds, peak.total_bytes)


def _way(candidate: Candidate) -> Way:
    c = candidate
    return Way(c.layout, c.schedule, c.geometry, c.batch, c.recompute, c.seconds, c.peak_bytes)


def _tuned(start: Task, before: Way, found: Found, bounds: Bounds, limit: int) -> Tuned:
    best = found.best
    return Tuned(
        _way(best),
        before,
        tuple(map(_way, found.runners_up)),
        found.binding,
        found.prices,
        gains_of(best, start.rates),
        found.unlimited_seconds,
        limit,
        bounds.margin,
        len(found.searched),
        found.cases,
        best.proven,
        lambda: _frontier(start, found),
    )


def _frontier(start: Task, found: Found) -> tuple[FrontierPoint, ...]:
    gpus = start.geometry.gpus
    points = frontier_of(found.searched, [each.case for each in (found.best, *found.runners_up)])
    return tuple(FrontierPoint(limit, start.tokens / (best.seconds * gpus), _way(best)) for limit, best in points)
