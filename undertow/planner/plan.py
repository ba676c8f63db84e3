"""A plan: parameters, memory of every rank, operations and the timeline of one iteration, all from closed forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from undertow.config.clusters import Pool, parse_cluster
from undertow.config.errors import ConfigError
from undertow.config.gpus import Gpu
from undertow.config.layout import Layout
from undertow.config.model import ModelConfig
from undertow.config.schema import RunConfig
from undertow.model.flops import StepFlops, step_flops
from undertow.model.parameters import Counts, closed_counts
from undertow.planner.calibration.file import read_calibration
from undertow.planner.calibration.measured import Calibration
from undertow.planner.choice import Options, choose
from undertow.planner.memory.model import GB, GIB, Memory, leaner
from undertow.planner.memory.recompute import NONE, Recompute
from undertow.planner.notes import notes
from undertow.planner.options import Granularity
from undertow.planner.pipeline.timeline import Timeline
from undertow.planner.serving.decode_text import decode_document
from undertow.planner.serving.replicas import Replicas, plan_rollout, refusal
from undertow.planner.serving.text import unmeasured
from undertow.planner.subject import read_subject
from undertow.planner.task import Task
from undertow.planner.timing.costs import tflops_per_gpu
from undertow.planner.tuner.tune import Progress
from undertow.planner.tuner.tuned import Tuned
from undertow.planner.tuner.tuning import MARGIN, Bounds, choose_tuned


@dataclass(frozen=True)
class PlanFlops:
    """Floating-point operations of an iteration, in both conventions (`undertow.model.flops`); `terms` has every term
    of both, forward and backward."""

    terms: StepFlops

    @property
    def algorithmic_per_iteration(self) -> float:
        """The arithmetic of the architecture."""
        return sum(work.total for work in self.terms.algorithmic.values())

    @property
    def reported_per_iteration(self) -> float:
        """The published convention, which counts every stream."""
        return sum(work.total for work in self.terms.reported.values())


@dataclass(frozen=True)
class PlanTime:
    """Seconds of an iteration as simulated; `calibration` names the rates, `tflops_per_gpu` are (algorithmic,
    reported)."""

    seconds_per_iteration: float
    tokens_per_second_per_gpu: float
    tflops_per_gpu: tuple[float, float]
    calibration: str


@dataclass(frozen=True)
class Plan:
    """A run under a layout, as projected. Built by `plan` or `evaluate`.

    `task` is what was decided before the layout; `stages` are the layout's, `recompute` what is computed again.
    With a second pool of GPUs the first trains and `rollout` is the one that samples. `tuned` says how the tuner came
    by the layout, None without it.
    """

    task: Task
    stages: Layout
    recompute: Recompute
    memory: Memory
    timeline: Timeline
    rollout: Replicas | None = None
    tuned: Tuned | None = None

    @cached_property
    def parameters(self) -> Counts:
        """Numbers of parameters: `main`, `total`, `active`, `by_module`."""
        return closed_counts(self.task.config)

    @cached_property
    def flops(self) -> PlanFlops:
        """Operations of an iteration."""
        task = self.task
        return PlanFlops(
            step_flops(
                task.config,
                task.batch.sequence_length,
                task.tokens,
                frozen_indexer=task.frozen_indexer,
                mtp=task.microbatch.objective.mtp,
            )
        )

    @property
    def time(self) -> PlanTime:
        """Seconds of an iteration, and rates that follow."""
        task, seconds = self.task, float(self.timeline.seconds)
        gpus = task.geometry.gpus
        each = tflops_per_gpu(task.config, task.batch.sequence_length, task.tokens, seconds, gpus)
        return PlanTime(seconds, task.tokens / (seconds * gpus), each, task.rates.name)

    @cached_property
    def decode(self) -> dict[str, Any]:
        """Cache and operations for the next token of the trained model, as plain values."""
        return decode_document(self.task.config, self.task.batch.sequence_length)

    @property
    def layout(self) -> str:
        """The layout in its canonical spelling."""
        return str(self.stages)

    @property
    def fits(self) -> bool:
        """Whether every rank stays within the memory of its GPU."""
        return self.memory.fits and (self.rollout is None or self.rollout.fits)

    @property
    def uncalibrated(self) -> tuple[str, ...]:
        """In sentences, what no measurement covers."""
        more = () if self.rollout is None else (f"rollout: {note}" for note in unmeasured(self.rollout))
        return (*notes(self.task, self.memory), *more)

    @property
    def refusal(self) -> str | None:
        """In one sentence, what does not fit: the fullest stage and its largest term."""
        if self.memory.fits:
            return None if self.rollout is None else refusal(self.rollout)
        peak, limit = self.memory.peak, self.memory.limit_bytes
        term = max(peak.terms, key=lambda term: term.bytes)
        place = f"{'stage' if self.task.chunks == 1 else 'pipeline rank'} {peak.stage}"
        return (
            f"{self.task.name} does not fit {self.task.pool}: a GPU of {place} needs "
            f"{_size(peak.total_bytes)} of {_size(limit)}, the most for '{term.name}', {_size(term.bytes)}; take more "
            f"GPUs, another layout, recomputed layers or {leaner(term)}"
        )

    def json(self) -> dict[str, Any]:
        """The plan as plain values under stable names."""
        from undertow.planner.document import plan_document

        return plan_document(self)

    def __str__(self) -> str:
        from undertow.planner.text import plan_text

        return plan_text(self)


def _size(size: int) -> str:
    return f"{size / GB:,.1f} GB ({size / GIB:,.1f} GiB)"


def evaluate(task: Task, layout: Layout, recompute: Recompute = NONE) -> Plan:
    """The plan of a task under a layout. Raises `ConfigError` where the two do not suit each other."""
    return Plan(task, layout, recompute, task.memory(layout, recompute), task.timeline(layout, recompute))


def plan(
    config_or_recipe: str | Path | ModelConfig | RunConfig,
    gpus: str = "32xMI355X",
    *,
    layout: str | Sequence[Sequence[str]] | None = None,
    tensor: int | None = None,
    pipeline: int | None = None,
    expert: int | None = None,
    context: int | None = None,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    sequence_length: int | None = None,
    schedule: str | None = None,
    recompute: str | Sequence[int] | Recompute | None = None,
    state: str | None = None,
    implementation: str | None = None,
    offload_optimizer: bool = False,
    calibration: str | Path | Calibration | None = None,
    tune: bool = False,
    margin: float | None = None,
    memory_limit: float | None = None,
    granularity: Granularity = "layer",
    progress: Progress | None = None,
    own_gpus: Sequence[Gpu] = (),
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Plan:
    """What a run on these GPUs holds, computes and takes, without a GPU and without torch.

    `config_or_recipe` is a preset, a recipe, a model directory or a configuration; see `read_subject` for defaults.
    `gpus` is `NxGPU`, or `NxGPU+NxGPU` for GPUs that train and GPUs that sample. Widths that are None are a recipe's
    own, or chosen: `expert` up to 8, `pipeline` the smallest that fits, the others 1, and `tensor` wider where nothing
    fits with 1. `recompute` are layers, or text as `read_recompute` takes it. `offload_optimizer` keeps the optimizer
    state in the memory of the host. `calibration` is a file of `write_calibration`, or one that was read; the shipped
    one otherwise.
    Raises `ConfigError` for what cannot be; a plan that does not fit is returned and says so (`fits`, `refusal`).

    A GPU may take `memory_limit` GB (its memory) less the share `margin` (0, and 0.05 with `tune`).

    With `tune` layout and recomputation are searched for, and widths, micro-batch and schedule that nobody states;
    `progress` hears how far that is. Then `tuned` is there, and `DoesNotFit` is raised where nothing fits.
    """
    options = Options(
        layout, tensor, pipeline, expert, context, micro_batch, global_batch, sequence_length, schedule, recompute,
        state, implementation, offload_optimizer, calibration=_calibration(calibration, own_gpus),
    )  # fmt: skip
    pools = _pools(gpus, own_gpus)
    subject = read_subject(config_or_recipe, pools[0].count, overrides, environment or {})
    tuned = None
    if tune:
        bounds = Bounds(MARGIN if margin is None else margin, memory_limit, granularity)
        chosen, tuned = choose_tuned(subject, pools[0], options, bounds, progress)
    else:
        chosen = choose(subject, Bounds(margin or 0.0, memory_limit).within(pools[0]), options)
    found = replace(evaluate(*chosen), tuned=tuned)
    if len(pools) == 1:
        return found
    task = found.task
    return replace(found, rollout=plan_rollout(task.config, pools[1], task.batch.sequence_length))


def _calibration(given: str | Path | Calibration | None, own: Sequence[Gpu]) -> Calibration | None:
    return read_calibration(Path(given), tuple(own)) if isinstance(given, str | Path) else given


def _pools(gpus: str, own: Sequence[Gpu]) -> tuple[Pool, ...]:
    pools = parse_cluster(gpus, own)
    if len(pools) > 2:
        raise ConfigError(
            f"gpus '{gpus}': {len(pools)} pools; allowed: one that trains, or one that trains + one that samples"
        )
    return pools
