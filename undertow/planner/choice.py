"""From what a user says to a task and a layout: widths that are left open are chosen, the pipeline's by what fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from undertow.config.clusters import Pool
from undertow.config.errors import ConfigError
from undertow.config.presets import nearest
from undertow.config.schema import RunConfig
from undertow.model.activations import Objective
from undertow.planner.activations import Implementation, Microbatch, implementation_of
from undertow.planner.geometry import Batch, Geometry, build_geometry, check_batch, check_model
from undertow.planner.layout import Layout, check_layout, parse_layout
from undertow.planner.schedules import ScheduleName, placement_of
from undertow.planner.state import StateProfile, profile_of_run, state_profile
from undertow.planner.subject import Subject
from undertow.planner.task import Task, read_layers

EXPERT = 8
"""Largest width of expert parallelism that is chosen unasked: one node."""

Chosen = tuple[Task, Layout, frozenset[int]]
"""A task with its layout and the layers that are recomputed."""


@dataclass(frozen=True)
class Options:
    """What a user may say; what is None is chosen. Widths are in ranks, batches in sequences."""

    layout: str | Sequence[Sequence[str]] | None = None
    tensor: int = 1
    pipeline: int | None = None
    expert: int | None = None
    context: int = 1
    micro_batch: int | None = None
    global_batch: int | None = None
    sequence_length: int | None = None
    schedule: str | None = None
    recompute: str | Sequence[int] | None = None
    state: str | None = None
    implementation: str | None = None


def choose(subject: Subject, pool: Pool, options: Options) -> Chosen:
    """The task, its layout and the layers that are recomputed.

    An open pipeline width is that of a given layout, or the smallest that fits the GPUs; if none fits, the one whose
    fullest rank is smallest. Raises `ConfigError` where no width can share out the model and the batch.
    """
    layout = None if options.layout is None else parse_layout(options.layout)
    schedule = _schedule(options, layout)
    best: tuple[int, Chosen] | None = None
    refusal: ConfigError | None = None
    for pipeline in _widths(subject, pool, options, layout, schedule):
        try:
            found = _task(subject, pool, options, pipeline, layout, schedule)
            peak = found[0].memory(*found[1:]).peak.total_bytes
        except ConfigError as error:
            refusal = refusal or error
            continue
        if peak <= pool.gpu.memory:
            return found
        if best is None or peak < best[0]:
            best = peak, found
    if best is None:
        assert refusal is not None
        raise refusal
    return best[1]


def _schedule(options: Options, layout: Layout | None) -> ScheduleName:
    name = options.schedule
    if name is None:
        stages = len(layout.stages) if layout else 0
        return "interleaved" if options.pipeline and stages > options.pipeline else "1f1b"
    known = get_args(ScheduleName)
    if name not in known:
        raise ConfigError(f"unknown schedule '{name}'{nearest(name, list(known))} (schedules: {', '.join(known)})")
    return name  # type: ignore[return-value]


def _widths(
    subject: Subject, pool: Pool, options: Options, layout: Layout | None, schedule: ScheduleName
) -> Sequence[int]:
    if options.pipeline is not None:
        return [options.pipeline]
    if layout is None:
        most = min(pool.count, subject.run.model.num_hidden_layers)
        return [width for width in range(1, most + 1) if pool.count % width == 0]
    stages = len(layout.stages)
    if schedule == "interleaved":
        raise ConfigError(
            f"schedule interleaved with a layout of {stages} stages: how many pipeline ranks share them? Give --pp"
        )
    return [stages // 2 if schedule == "zbv" and stages % 2 == 0 else stages]


def _task(
    subject: Subject, pool: Pool, options: Options, pipeline: int, layout: Layout | None, schedule: ScheduleName
) -> Chosen:
    run = subject.run
    expert = _expert(run, pool, options, pipeline) if options.expert is None else options.expert
    geometry = build_geometry(
        pool.count, tensor=options.tensor, pipeline=pipeline, expert=expert, context=options.context
    )
    check_model(run.model, geometry)
    batch = _batch(run, options, geometry)
    check_batch(run.model, geometry, batch)
    implementation = _implementation(subject, options, geometry)
    objective = _objective(run, batch)
    task = Task(
        subject.name,
        pool,
        Microbatch(run.model, geometry, batch, implementation, run.numerics.dtype, objective),
        _profile(subject, options, geometry),
        schedule,
        2 if schedule in ("interleaved", "zbv") else 1,
        run.indexer.frozen,
    )
    chosen = layout or task.even_layout()
    check_layout(chosen, run.model, pipeline, placement_of(schedule))
    return task, chosen, _recompute(run, options, chosen)


def _expert(run: RunConfig, pool: Pool, options: Options, pipeline: int) -> int:
    """The largest width up to 8 that divides the ranks of a stage and the experts."""
    ranks, experts = max(1, pool.count // max(1, pipeline)), run.model.n_routed_experts
    return max(width for width in range(1, EXPERT + 1) if ranks % width == 0 and experts % width == 0)


def _batch(run: RunConfig, options: Options, geometry: Geometry) -> Batch:
    """The batch of the run. Without a micro-batch, a rank takes its share in one pass, as training does."""
    size = run.train.batch_size if options.global_batch is None else options.global_batch
    length = run.train.sequence_length if options.sequence_length is None else options.sequence_length
    micro = run.train.micro_batch_size if options.micro_batch is None else options.micro_batch
    return Batch(size, length, max(1, size // geometry.data) if micro is None else micro)


def _own(subject: Subject, geometry: Geometry) -> bool:
    """Whether the plan is of Undertow's own training: a recipe's, and whatever runs on one GPU."""
    return (subject.recipe or geometry.gpus == 1) and geometry.tensor == 1


def _implementation(subject: Subject, options: Options, geometry: Geometry) -> Implementation:
    if options.implementation is not None:
        return implementation_of(options.implementation)
    if _own(subject, geometry):
        return "reference"
    return "primus" if geometry.tensor == 1 and 1 < geometry.expert <= EXPERT else "tight"


def _profile(subject: Subject, options: Options, geometry: Geometry) -> StateProfile:
    if options.state is not None:
        return state_profile(options.state)
    return profile_of_run(subject.run) if subject.recipe or geometry.gpus == 1 else state_profile("published-bf16")


def _objective(run: RunConfig, batch: Batch) -> Objective:
    train = run.train
    return Objective(
        mtp=max(train.mtp_weight, train.mtp_weight_in_decay) > 0 and run.model.num_nextn_predict_layers > 0,
        distil=not run.indexer.frozen,
        balance_rows=batch.micro_batch if train.balance_weight else 0,
    )


def _recompute(run: RunConfig, options: Options, layout: Layout) -> frozenset[int]:
    asked = run.recompute.layers if options.recompute is None else options.recompute
    return read_layers(asked if isinstance(asked, str) else ",".join(map(str, _some(asked))) or "none", layout)


def _some(layers: Sequence[int]) -> Iterator[int]:
    yield from sorted(set(layers))
