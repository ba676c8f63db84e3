"""From what a user says to the tuned task, layout and recomputation: what is stated stays, the rest is searched."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

from undertow.config.clusters import Pool
from undertow.config.errors import ConfigError, DoesNotFit
from undertow.config.layout import Layout
from undertow.config.presets import PRESETS
from undertow.planner.choice import Chosen, Options, choose, stated, usual_chunks, usual_implementation
from undertow.planner.memory.model import GB
from undertow.planner.memory.recompute import Recompute
from undertow.planner.options import Granularity
from undertow.planner.subject import MICRO_BATCH, Subject
from undertow.planner.task import Task
from undertow.planner.tuner.candidate import Candidate
from undertow.planner.tuner.fragment import Origin, said_again
from undertow.planner.tuner.frontier import frontier_of
from undertow.planner.tuner.gains import gains_of
from undertow.planner.tuner.grid import Grid, open_grid
from undertow.planner.tuner.tune import Found, Progress, tune
from undertow.planner.tuner.tuned import FrontierPoint, Tuned, Way

MARGIN = 0.05
"""Share of a GPU's memory that is left free unasked."""

_WIDER = (1, 2, 4, 8)
_MOST_CHUNKS = 4
_HELD_BACK = 1.1  # times the seconds without a limit, above which wider tensor and context parallelism are tried


@dataclass(frozen=True)
class Bounds:
    """What a search keeps to: `memory_limit` is in GB and None for that of the GPU, of which a share `margin` is left
    free; `granularity` says whether single modules are computed again, or whole layers alone."""

    margin: float = MARGIN
    memory_limit: float | None = None
    granularity: Granularity = "layer"

    def within(self, pool: Pool) -> Pool:
        """The pool, its GPUs with no more memory than may be taken."""
        return pool._replace(gpu=replace(pool.gpu, memory=self.limit_bytes(pool)))

    def limit_bytes(self, pool: Pool) -> int:
        """Bytes that a GPU may take. Raises `ConfigError` for a margin, limit or granularity that cannot be."""
        if not 0 <= self.margin < 1:
            raise ConfigError(f"margin is {self.margin}; allowed: at least 0, below 1")
        if self.memory_limit is not None and not 0 < self.memory_limit * GB <= pool.gpu.memory:
            raise ConfigError(
                f"memory limit is {self.memory_limit} GB; allowed: above 0, at most the {pool.gpu.memory / GB:g} GB of "
                f"{pool.gpu.name}"
            )
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
    found = _search(subject, stated(subject.run, options), (start, layout), limit, bounds, progress)
    best = found.best
    chosen = _task(start, best), best.layout, best.recompute
    before, kept = _start(start, layout, recompute), _kept(stated(subject.run, options), found)
    return chosen, _tuned(start, before, found, bounds, limit, _origin(subject, pool, options, best), kept)


def _search(
    subject: Subject,
    fixed: Options,
    begun: tuple[Task, Layout],
    limit: int,
    bounds: Bounds,
    progress: Progress | None,
) -> Found:
    """Without tensor and context parallelism, or with what the start has and more; with all where nothing fits, and
    where memory holds the best back by much."""
    start = begun[0]
    grid, own = _grid(subject, fixed, start), start.geometry
    plain = _implemented(subject, fixed, start, 1)
    if fixed.tensor is not None:
        first = [(start, grid)]
    else:
        wider = tuple(width for width in _WIDER if width >= own.tensor)
        first = [(plain, grid)] + [(start, replace(grid, tensor=wider))] * (own.tensor > 1)
        if own.tensor == 1 and start.microbatch.implementation != plain.microbatch.implementation:
            first.append((start, grid))
    ask = partial(tune, limit=limit, granularity=bounds.granularity, progress=progress)
    try:
        found = ask(first, start=begun)
    except DoesNotFit as refusal:
        with suppress(DoesNotFit, ConfigError):
            return ask(_wide(subject, fixed, start, replace(grid, micro_batch=_rows(subject, fixed, grid))))
        raise refusal from None
    if found.best.seconds > _HELD_BACK * found.unlimited_seconds:
        with suppress(DoesNotFit, ConfigError):
            found = found.joined(ask(_wide(subject, fixed, start, grid), below=found.best.seconds))
    return found


def _wide(subject: Subject, fixed: Options, start: Task, grid: Grid) -> list[tuple[Task, Grid]]:
    """Grids with tensor and context parallelism, as far as nobody states them."""
    wide = replace(grid, context=_WIDER) if fixed.context is None else grid
    if fixed.tensor is not None:
        return [(start, wide)]
    wider = _implemented(subject, fixed, start, _WIDER[1])
    return [(_implemented(subject, fixed, start, 1), wide), (wider, replace(wide, tensor=_WIDER[1:]))]


def _rows(subject: Subject, fixed: Options, grid: Grid) -> tuple[int, ...]:
    return open_grid(1, 1).micro_batch if _open_rows(subject, fixed) else grid.micro_batch


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


def _origin(subject: Subject, pool: Pool, options: Options, best: Candidate) -> Origin:
    """What has to be said to plan the best again from its fragment."""
    own = subject.recipe or pool.count == 1  # whose state is that of the recipe
    state = options.state or (None if own else best.case.memory.profile.name.removesuffix(" on the host"))
    given = {
        "implementation": best.case.memory.m.implementation,
        "state": state,
        "offload-optimizer": options.offload_optimizer,
    }
    preset = subject.name if subject.name in PRESETS and not subject.recipe else None
    return Origin(preset, subject.run.numerics.dtype, said_again(subject.words, str(pool), given))


def _kept(fixed: Options, found: Found) -> str:
    """Which widths were not widened, in a sentence; empty where all were."""
    geometries = [case.memory.m.geometry for case in found.searched]
    open_widths = {"tensor": fixed.tensor, "context": fixed.context}
    kept = [
        f"{name} {getattr(geometries[0], name)}"
        for name, given in open_widths.items()
        if given is None and len({getattr(each, name) for each in geometries}) == 1
    ]
    if not kept:
        return ""
    words = " or ".join({"tensor": "--tp N", "context": "--cp N"}[each.split()[0]] for each in kept)
    return f"{' and '.join(kept)} were kept, for something fits: wider ones may be faster, {words} searches with them"


def _tuned(start: Task, before: Way, found: Found, bounds: Bounds, limit: int, origin: Origin, kept: str) -> Tuned:
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
        origin,
        found.room,
        kept,
        lambda: _frontier(start, found),
    )


def _frontier(start: Task, found: Found) -> tuple[FrontierPoint, ...]:
    gpus = start.geometry.gpus
    points = frontier_of(found.searched, [each.case for each in (found.best, *found.runners_up)])
    return tuple(FrontierPoint(limit, start.tokens / (best.seconds * gpus), _way(best)) for limit, best in points)
