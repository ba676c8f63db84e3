"""From what a user says to a task and a layout: widths that are left open are chosen, the pipeline's by what fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import get_args

from undertow.config.clusters import Pool
from undertow.config.errors import ConfigError
from undertow.config.layout import Layout, check_layout, parse_layout
from undertow.config.presets import nearest
from undertow.config.schema import RunConfig
from undertow.model.activations import Objective
from undertow.model.kernels import in_kernels
from undertow.planner.calibration.file import shipped_calibration
from undertow.planner.calibration.measured import Calibration
from undertow.planner.geometry import Batch, Geometry, build_geometry, check_batch, check_model
from undertow.planner.memory.activations import Implementation, Microbatch, implementation_of
from undertow.planner.memory.recompute import Recompute, recompute_of
from undertow.planner.memory.state import StateProfile, on_host, profile_of_run, state_profile
from undertow.planner.pipeline.schedules import ScheduleName, check_schedule, placement_of
from undertow.planner.subject import Subject
from undertow.planner.task import Task

EXPERT = 8
"""Largest width of expert parallelism that is chosen unasked: one node."""

TENSOR: tuple[int, ...] = (1, 2, 4, 8)
"""Widths of tensor parallelism that are tried unasked, each where nothing fits with those before it."""

Chosen = tuple[Task, Layout, Recompute]
"""A task with its layout and what is recomputed."""


@dataclass(frozen=True)
class Options:
    """What a user may say; what is None is the recipe's, or chosen. Widths are in ranks, batches in sequences."""

    layout: str | Sequence[Sequence[str]] | None = None
    tensor: int | None = None
    pipeline: int | None = None
    expert: int | None = None
    context: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    sequence_length: int | None = None
    schedule: str | None = None
    recompute: str | Sequence[int] | Recompute | None = None
    state: str | None = None
    implementation: str | None = None
    offload_optimizer: bool = False
    calibration: Calibration | None = None


def choose(subject: Subject, pool: Pool, options: Options) -> Chosen:
    """The task, its layout and what is recomputed.

    An open pipeline width is that of a given layout, or the smallest that fits the GPUs; an open tensor width is 1, or
    wider where nothing fits with 1. A schedule that needs a pipeline gets one, see `_scheduled`. If none fits, the one
    whose fullest rank is smallest. Raises `ConfigError` where no width can share out the model and the batch.
    """
    options = stated(subject.run, options)
    best: tuple[int, Chosen] | None = None
    refused: list[ConfigError] = []
    tried: list[tuple[int, str]] = []
    piped = options.schedule not in (None, "1f1b") and options.layout is None
    for found in (_scheduled if piped else candidates)(subject, pool, options, refused):
        try:
            peak = found[0].memory(*found[1:]).peak.total_bytes
        except ConfigError as error:
            refused.append(error)
            continue
        if peak <= pool.gpu.memory:
            under = {used: None for width, used in tried if width < found[0].geometry.tensor}
            return _told(found, options, f"with less nothing fits under implementation {' or '.join(under)}")
        tried.append((found[0].geometry.tensor, found[0].microbatch.implementation))
        if best is None or peak < best[0]:
            best = peak, found
    if best is None:
        raise refused[0]
    return _told(best[1], options, "nothing fits, and with it the fullest GPU is least full,")


def _told(found: Chosen, options: Options, why: str) -> Chosen:
    """With a remark on a tensor width that nobody gave."""
    task, *rest = found
    tensor = task.geometry.tensor
    if tensor == 1 or options.tensor is not None:
        return found
    told = f"choice: tensor {tensor}, for {why} on {task.pool}; --tp gives another"
    return replace(task, remarks=(*task.remarks, told)), *rest  # type: ignore[return-value]


def _scheduled(subject: Subject, pool: Pool, options: Options, refused: list[ConfigError]) -> Iterator[Chosen]:
    """As `candidates`, for a schedule that only a pipeline runs: an open pipeline width is at least 2, where there are
    as many GPUs, and that which 1F1B would have. Where the published implementation does not fit, a fused one is
    tried before wider widths."""
    open_widths = _widths(subject, pool, options, None, _schedule(options, None))
    widths = open_widths
    if options.pipeline is None:
        least = 2
        with suppress(ConfigError):
            usual = choose(subject, pool, replace(options, schedule="1f1b"))
            least = max(2, usual[0].geometry.pipeline)
        widths = [width for width in open_widths if width >= least] or open_widths[-1:]
    for tensor in TENSOR if options.tensor is None else (options.tensor,):
        for pipeline in widths:
            given = replace(options, tensor=tensor, pipeline=pipeline)
            for found in candidates(subject, pool, given, refused):
                yield found
                if options.implementation is None and found[0].microbatch.implementation == "primus":
                    for other in candidates(subject, pool, replace(given, implementation="tight"), refused):
                        yield _leaner(other)


def _leaner(found: Chosen) -> Chosen:
    """With a remark on the implementation."""
    task, *rest = found
    told = (
        f"choice: implementation tight, for under primus pipeline {task.geometry.pipeline} does not fit "
        f"{task.pool}; --implementation gives another"
    )
    return replace(task, remarks=(*task.remarks, told)), *rest  # type: ignore[return-value]


def candidates(subject: Subject, pool: Pool, options: Options, refused: list[ConfigError]) -> Iterator[Chosen]:
    """Every combination of the widths that are left open, in the order in which they are preferred; the reasons against
    those that cannot be are added to `refused`."""
    options = stated(subject.run, options)
    layout = None if options.layout is None else parse_layout(options.layout)
    schedule = _schedule(options, layout)
    for tensor in TENSOR if options.tensor is None else (options.tensor,):
        for pipeline in _widths(subject, pool, options, layout, schedule):
            try:
                found = _chosen(subject, pool, replace(options, tensor=tensor), pipeline, layout, schedule)
            except ConfigError as error:
                refused.append(error)
            else:
                yield found


def stated(run: RunConfig, options: Options) -> Options:
    """Options with what the section `parallel` of the run states beneath them.

    Its layout goes with its pipeline and schedule: with another of one of these, layers are spread anew.
    """
    parallel, told = run.parallel, run.parallel.model_fields_set - {"gpus"}
    given = {name: getattr(parallel, name) for name in told if getattr(options, name) is None}
    other = {name: getattr(options, name) for name in ("pipeline", "schedule")}
    if any(value not in (None, getattr(parallel, name)) for name, value in other.items() if name in told):
        given.pop("layout", None)
    return replace(options, **given)


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


def _chosen(
    subject: Subject, pool: Pool, options: Options, pipeline: int, layout: Layout | None, schedule: ScheduleName
) -> Chosen:
    chunks = max(1, len(layout.stages) // pipeline) if layout else usual_chunks(schedule)
    task = build_task(subject, pool, options, pipeline, schedule, chunks)
    check_schedule(schedule, pipeline, task.microbatches, chunks)
    stages = layout or task.even_layout()
    check_layout(stages, task.config, pipeline, placement_of(schedule))
    return task, stages, _recompute(subject.run, options, stages)


def usual_chunks(schedule: ScheduleName) -> int:
    """Stages of a pipeline rank where no layout says how many."""
    return 2 if schedule in ("interleaved", "zbv") else 1


def build_task(
    subject: Subject, pool: Pool, options: Options, pipeline: int, schedule: ScheduleName, chunks: int
) -> Task:
    """The task of one pipeline width and schedule. Raises `ConfigError` where model or batch cannot be shared out."""
    run = subject.run
    expert = _expert(run, pool, options, pipeline) if options.expert is None else options.expert
    geometry = build_geometry(
        pool.count,
        tensor=1 if options.tensor is None else options.tensor,
        pipeline=pipeline,
        expert=expert,
        context=1 if options.context is None else options.context,
        shard=run.parallel.shard,
    )
    check_model(run.model, geometry)
    batch = _batch(run, options, geometry)
    check_batch(run.model, geometry, batch)
    implementation = usual_implementation(subject, options, geometry)
    objective = _objective(run, batch)
    return Task(
        subject.name,
        pool,
        Microbatch(run.model, geometry, batch, implementation, run.numerics.dtype, objective, in_kernels(run)),
        _profile(subject, options, geometry),
        schedule,
        chunks,
        run.indexer.frozen,
        options.calibration or shipped_calibration(),
        _stages(run),
    )


def _stages(run: RunConfig) -> tuple[str, ...]:
    """With a remark on steps that begin a run otherwise than it is planned."""
    dense = run.indexer.dense_steps + run.indexer.warmup_steps
    told = f"choice: planned are steps with sparse attention; the first {dense:,} of this run are dense"
    return (told,) if dense else ()


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


def usual_implementation(subject: Subject, options: Options, geometry: Geometry) -> Implementation:
    """The one asked for; unasked, Undertow's own for its training, and for a model alone that of a given calibration,
    or the published one where it can run."""
    if options.implementation is not None:
        return implementation_of(options.implementation)
    published = geometry.tensor == 1 and 1 < geometry.expert <= EXPERT
    if options.calibration is not None and not options.calibration.of_operators and not subject.recipe:
        measured = options.calibration.measured.implementation
        return measured if measured != "primus" or published else "tight"
    if _own(subject, geometry):
        return "reference"
    return "primus" if published else "tight"


def _profile(subject: Subject, options: Options, geometry: Geometry) -> StateProfile:
    if options.state is not None:
        profile = state_profile(options.state)
    elif options.calibration is not None and not options.calibration.of_operators and not subject.recipe:
        profile = options.calibration.measured.profile
    elif subject.recipe or geometry.gpus == 1:
        profile = profile_of_run(subject.run)
    else:
        profile = state_profile("published-bf16")
    return on_host(profile) if options.offload_optimizer else profile


def _objective(run: RunConfig, batch: Batch) -> Objective:
    train = run.train
    return Objective(
        mtp=max(train.mtp_weight, train.mtp_weight_in_decay) > 0 and run.model.num_nextn_predict_layers > 0,
        distil=not run.indexer.frozen,
        balance_rows=batch.micro_batch if train.balance_weight else 0,
    )


def _recompute(run: RunConfig, options: Options, layout: Layout) -> Recompute:
    if options.recompute is not None:
        return recompute_of(options.recompute, layout)
    own, every = run.recompute, range(run.model.num_hidden_layers)
    whole = recompute_of(own.layers, layout)
    named = {name: every if layers == "all" else layers for name, layers in own.modules.items()}
    return Recompute.of(whole.layers, **{name: set(layers) - whole.layers for name, layers in named.items()})
