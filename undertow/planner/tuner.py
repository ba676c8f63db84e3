"""The fastest pipeline that fits: layout, schedule, layers computed again, and the widths of an outer grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from undertow.config.clusters import Pool
from undertow.config.errors import ConfigError, DoesNotFit
from undertow.config.model import ModelConfig
from undertow.planner.activations import Implementation, Microbatch, check_pool
from undertow.planner.calibration import MemoryCalibration
from undertow.planner.case import Case
from undertow.planner.costs import MicrobatchShape, model_times
from undertow.planner.descent import even_cuts
from undertow.planner.geometry import Batch, Geometry, build_geometry, check_batch, check_model
from undertow.planner.knapsack import Knapsacks
from undertow.planner.layout import Layout
from undertow.planner.memory import GB, Memory, MemoryModel
from undertow.planner.pipeline import pipeline_timeline
from undertow.planner.price import StagePrice, bound_of
from undertow.planner.rates import Rates
from undertow.planner.schedules import ScheduleName
from undertow.planner.search import search
from undertow.planner.state import Sharing, StateProfile
from undertow.planner.timeline import Time
from undertow.planner.trials import Trial, Trials

_ATTEMPTS = 4  # searches with a lower limit, where memory turned out higher than the search had it


@dataclass(frozen=True)
class Grid:
    """Widths, micro-batches and schedules (with stages a rank) to try; combinations that cannot be are left out."""

    pipeline: tuple[int, ...] = (1, 2, 4, 8, 16)
    expert: tuple[int, ...] = (1, 2, 4, 8)
    tensor: tuple[int, ...] = (1,)
    context: tuple[int, ...] = (1,)
    micro_batch: tuple[int, ...] = (1,)
    schedules: tuple[tuple[ScheduleName, int], ...] = (("1f1b", 1),)


@dataclass(frozen=True)
class Plan:
    """One way to run: an iteration takes `seconds` in simulation, and `memory` tells every rank.

    `proven`: no other layout of this geometry and schedule is faster within the limit.
    """

    layout: Layout
    schedule: ScheduleName
    chunks: int
    geometry: Geometry
    batch: Batch
    recompute: tuple[int, ...]
    seconds: float
    memory: Memory
    proven: bool

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return self.memory.peak.total_bytes

    @property
    def order(self) -> tuple[float, int, int, str]:
        """Faster first, then of lower peak, then with fewer layers computed again."""
        return round(self.seconds, 10), self.peak_bytes, len(self.recompute), str(self.layout)

    @property
    def fragment(self) -> str:
        """YAML that a training recipe takes; what it has no keys for stands in comments."""
        g, batch = self.geometry, self.batch
        peak, limit = self.peak_bytes / GB, self.memory.limit_bytes / GB
        layers = f"[{', '.join(map(str, self.recompute))}]" if self.recompute else "none"
        return (
            f"# layout {self.layout}, schedule {self.schedule}, {batch.microbatches(g)} microbatches\n"
            f"# tensor {g.tensor}, pipeline {g.pipeline}, expert {g.expert}, context {g.context}, data {g.data}\n"
            f"# {self.seconds:.3f} s an iteration in simulation, {peak:.1f} of {limit:.1f} GB\n"
            "train:\n"
            f"  batch_size: {batch.size}\n"
            f"  micro_batch_size: {batch.micro_batch}\n"
            f"  sequence_length: {batch.sequence_length}\n"
            "recompute:\n"
            f"  layers: {layers}\n"
        )


@dataclass(frozen=True)
class Tuned:
    """The best plan and the next best; what holds it back, in a sentence; what a GB more on each rank would buy."""

    best: Plan
    runners_up: tuple[Plan, ...]
    binding: str
    unlimited_seconds: float
    prices: tuple[StagePrice, ...]
    uncalibrated: tuple[str, ...] = field(default=())


def tune(
    config: ModelConfig,
    pool: Pool,
    batch: Batch,
    *,
    rates: Rates,
    profile: StateProfile,
    implementation: Implementation,
    calibration: MemoryCalibration | None = None,
    limit: int | None = None,
    margin: float = 0.05,
    grid: Grid | None = None,
    transfer: Time = 0,
    frozen_indexer: bool = False,
    sharing: Sharing | None = None,
    deferred: bool = False,
    keep: int = 3,
) -> Tuned:
    """The fastest plan of a grid for a pool of GPUs, within `limit` bytes a GPU (the GPU's memory) less `margin`.

    `batch.micro_batch` is that of the grid. Raises `DoesNotFit` where nothing fits, and `ConfigError` where no
    combination of the grid can be, with the reason of the first.
    """
    if not 0 <= margin < 1:
        raise ConfigError(f"margin is {margin}; allowed: at least 0, below 1")
    bytes_each = int((pool.gpu.memory if limit is None else limit) * (1 - margin))
    if bytes_each < 1:
        raise ConfigError(f"limit is {limit} bytes; allowed: at least 1")
    refused: list[ConfigError] = []
    cases: list[Case] = []
    for geometry, sized in _combinations(config, pool, batch, grid or Grid(), implementation, refused):
        sharers = geometry.tensor * geometry.context
        shape = MicrobatchShape(config, sized.sequence_length, sized.micro_batch, sharers, frozen_indexer)
        times = model_times(shape, rates)
        memory = MemoryModel(
            Microbatch(config, geometry, sized, implementation), profile, calibration, sharing, deferred
        )
        limits = (bytes_each,) * geometry.pipeline
        for schedule, chunks in (grid or Grid()).schedules:
            case = Case(times, memory, sized.microbatches(geometry), limits, schedule, chunks, transfer)
            try:
                _ = case.plan
            except ConfigError as error:
                refused.append(error)
            else:
                cases.append(case)
    if not cases:
        raise refused[0] if refused else ConfigError("the grid is empty; give at least one of every width and schedule")
    tuned = tune_cases(cases, keep)
    return replace(tuned, uncalibrated=(*tuned.uncalibrated, *_unmeasured(tuned.best, config, rates)))


def _combinations(
    config: ModelConfig,
    pool: Pool,
    batch: Batch,
    grid: Grid,
    implementation: Implementation,
    refused: list[ConfigError],
) -> Iterator[tuple[Geometry, Batch]]:
    widths = product(grid.pipeline, grid.expert, grid.tensor, grid.context, grid.micro_batch)
    for pipeline, expert, tensor, context, rows in widths:
        sized = replace(batch, micro_batch=rows)
        try:
            geometry = build_geometry(pool.count, tensor=tensor, pipeline=pipeline, expert=expert, context=context)
            check_model(config, geometry)
            check_batch(config, geometry, sized)
            if implementation == "primus":
                check_pool(config, geometry)
        except ConfigError as error:
            refused.append(error)
        else:
            yield geometry, sized


def _unmeasured(best: Plan, config: ModelConfig, rates: Rates) -> Iterator[str]:
    if not rates.covers(config, best.batch.sequence_length):
        yield f"time: rates {rates.name} were not fitted to this model, sequence length and GPU"
    widths = {"tensor": best.geometry.tensor, "context": best.geometry.context, "micro-batch": best.batch.micro_batch}
    for name, value in widths.items():
        if value != 1:
            yield f"time: {name} is {value}, no run with another than 1 was measured"


def tune_cases(cases: Sequence[Case], keep: int = 3) -> Tuned:
    """The fastest plan of several cases of one global batch, and the `keep` next ones.

    Cases that could not beat what is found even if no rank ever waited are skipped. Raises `DoesNotFit`.
    """
    found: list[tuple[Plan, Trials, Trial]] = []
    share = 1 / max(1, sum(case.chunks > 1 for case in cases))
    for case in sorted(cases, key=_promise):
        below = found[keep][0].seconds if len(found) > keep else float("inf")
        if _ideal(case) >= below:
            continue
        trials = Trials.of(case)
        found += [(plan, trials, trial) for plan, trial in _plans(trials, keep + 1, share, below)]
        found = sorted(found, key=lambda each: each[0].order)[: keep + 1]
    if not found:
        raise _nothing_fits(cases)
    best, trials, trial = found[0]
    bound = bound_of(trials, trial)
    others = tuple(plan for plan, _, _ in found[1:])
    return Tuned(best, others, bound.sentence, bound.unlimited_seconds, bound.prices, best.memory.uncalibrated)


def _ideal(case: Case) -> float:
    """Seconds if no rank ever waited and nothing were computed again."""
    return case.microbatches * sum(float(time.forward + time.backward) for time in case.part_times) / case.ranks


def _promise(case: Case) -> float:
    """A guess of its seconds: stages are equal, and fill and drain as the schedule does."""
    return _ideal(case) * (1 + (case.ranks - 1) / (case.microbatches * case.chunks))


def _plans(trials: Trials, keep: int, share: float, below: float) -> list[tuple[Plan, Trial]]:
    """The best layouts of a case, told by the simulation and the memory model themselves: only those that fit."""
    case = trials.case
    for _ in range(_ATTEMPTS):
        result = search(trials, keep, share=share, below=below)
        plans = [(_plan(case, trial, result.proven), trial) for trial in result.trials]
        excess = [_excess(case, plan.memory) for plan, _ in plans]
        fitting = [each for each, over in zip(plans, excess, strict=True) if over <= 0]
        if fitting or not plans:
            return fitting
        trials = trials.within(tuple(limit - min(excess) for limit in trials.case.limits))
    return []


def _excess(case: Case, memory: Memory) -> int:
    """Bytes that the rank furthest over its limit is over it."""
    return max(stage.total_bytes - limit for stage, limit in zip(memory.stages, case.limits, strict=True))


def _plan(case: Case, trial: Trial, proven: bool) -> Plan:
    layout, geometry = case.layout(trial.cuts), case.memory.m.geometry
    memory = case.weigh(layout, trial.recompute, max(case.limits))
    run = pipeline_timeline(
        layout,
        case.times,
        ranks=case.ranks,
        microbatches=case.microbatches,
        schedule=case.schedule,
        recompute=trial.recompute,
        transfer=case.transfer,
    )
    again = tuple(sorted(trial.recompute))
    seconds, batch = float(run.seconds), case.memory.m.batch
    return Plan(layout, case.schedule, case.chunks, geometry, batch, again, seconds, memory, proven)


def _nothing_fits(cases: Sequence[Case]) -> DoesNotFit:
    """How far from fitting the nearest case is, evenly laid out."""

    def fullest(case: Case) -> tuple[int, int]:
        known, even = Knapsacks(case), even_cuts(case)
        return max((known.fewest_bytes(rank, of), -rank) for rank, of in enumerate(case.rank_spans(even)))

    possible = [case for case in cases if case.stages <= len(case.parts)]
    if not possible:
        return DoesNotFit(f"{cases[0].stages} stages are more than the {len(cases[0].parts)} parts of the model")
    (size, rank), case = min(((fullest(case), case) for case in possible), key=lambda pair: pair[0])
    g = case.memory.m.geometry
    return DoesNotFit(
        f"no layout fits {case.limits[0] / GB:.1f} GB a GPU: the nearest, evenly laid out under {case.schedule} on "
        f"tensor {g.tensor}, pipeline {g.pipeline}, expert {g.expert} and context {g.context}, takes at least "
        f"{size / GB:.1f} GB on rank {-rank} with every layer computed again that may be; take more GPUs, a wider "
        "pipeline or expert width, or a smaller state profile"
    )
