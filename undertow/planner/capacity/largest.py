"""How much a given cluster holds: the largest micro-batch and the longest sequence of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from pathlib import Path
from typing import Any, Literal

from undertow.config.clusters import Pool, parse_cluster
from undertow.config.errors import ConfigError
from undertow.config.gpus import Gpu
from undertow.config.model import ModelConfig
from undertow.config.schema import RunConfig
from undertow.planner.capacity.fit import Fit, fit_of, unguarded, within
from undertow.planner.choice import EXPERT, Chosen, Options, candidates
from undertow.planner.memory.model import GB
from undertow.planner.notes import gathered
from undertow.planner.pipeline.schedules import splits_backward
from undertow.planner.subject import Subject, read_subject
from undertow.planner.table import columns
from undertow.planner.task import Task
from undertow.planner.tuner.tuning import Bounds

What = Literal["micro-batch", "sequence length"]


@dataclass(frozen=True)
class Largest:
    """The largest value of one option with which a run fits, and how it then runs; None where it fits with none."""

    what: What
    recompute: str
    value: int | None
    fit: Fit | None


@dataclass(frozen=True)
class LargestPlan:
    """What a cluster holds. Built by `plan_largest`."""

    name: str
    pool: Pool
    rows: tuple[Largest, ...]
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def fits(self) -> bool:
        """Whether the run fits at all."""
        return any(row.fit for row in self.rows)

    @property
    def refusal(self) -> str | None:
        """In one sentence, that nothing fits."""
        if self.fits:
            return None
        return f"{self.name} fits {self.pool} with no micro-batch and no sequence length; take more GPUs (--fit alone)"

    @property
    def uncalibrated(self) -> tuple[str, ...]:
        """In sentences, what no measurement covers, each once, with the rows it is about where not all are."""
        found = gathered({(row.what, row.recompute): (row.fit.task, row.fit.memory) for row in self.rows if row.fit})
        return (*unguarded(self.bounds), *dict.fromkeys(found))

    def json(self) -> dict[str, Any]:
        """The answer as plain values under stable names."""
        rows = []
        for row in self.rows:
            document: dict[str, Any] = {"largest": row.what, "recompute": row.recompute, "value": row.value}
            if fit := row.fit:
                g = fit.task.geometry
                document |= {
                    "tensor": g.tensor, "pipeline": g.pipeline, "expert": g.expert, "context": g.context,
                    "layout": str(fit.layout), "peak_bytes": fit.memory.peak.total_bytes,
                    "limit_bytes": fit.memory.limit_bytes, "seconds_per_iteration": fit.seconds,
                    "tokens_per_second_per_gpu": fit.tokens_per_second_per_gpu,
                }  # fmt: skip
            rows.append(document)
        return {
            "fit": rows,
            "margin": self.bounds.margin,
            "fits": self.fits,
            "refusal": self.refusal,
            "uncalibrated": list(self.uncalibrated),
        }

    def __str__(self) -> str:
        head = "largest,recomputed,value,tensor,pipeline,expert,peak GB,of,s/iteration,tokens/s/GPU"
        rows: list[list[str]] = [[str(title) for title in head.split(",")]]
        for row in self.rows:
            if row.fit is None:
                rows.append([row.what, row.recompute, "none", *["-"] * 7])
                continue
            fit, g = row.fit, row.fit.task.geometry
            sizes = [f"{size / GB:,.1f}" for size in (fit.memory.peak.total_bytes, fit.memory.limit_bytes)]
            widths = [str(g.tensor), str(g.pipeline), str(g.expert)]
            speed = [f"{fit.seconds:,.2f}", f"{fit.tokens_per_second_per_gpu:,.0f}"]
            rows.append([row.what, row.recompute, f"{row.value:,}", *widths, *sizes, *speed])
        lines = [
            f"{self.name} on {self.pool}: what fits",
            f"  {within(self.bounds)}; expert parallelism up to {EXPERT} was tried",
            *columns(rows, right=range(2, 10)),
        ]
        return "\n".join([*lines, "", "not calibrated", *(f"  {note}" for note in self.uncalibrated)])


def plan_largest(
    config_or_recipe: str | Path | ModelConfig | RunConfig,
    gpus: str,
    options: Options | None = None,
    *,
    bounds: Bounds | None = None,
    own_gpus: Sequence[Gpu] = (),
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> LargestPlan:
    """The largest micro-batch at the run's sequence length, and the longest sequence at its micro-batch, that a cluster
    `NxGPU` holds, both with nothing and with every layer computed again, or with what `options` say.

    The batch stays, so a micro-batch divides its share of a rank. Sequences are whole groups of the compressed layers.
    Open widths of tensor and pipeline are all tried; of equals the narrowest is told. `bounds` say how much of a GPU's
    memory may be taken: 95 % unasked. Raises `ConfigError` for what cannot be.
    """
    pools = parse_cluster(gpus, own_gpus)
    if len(pools) != 1:
        raise ConfigError(f"gpus '{gpus}': {len(pools)} pools; allowed: one, or GPU names without numbers")
    pool, options, bounds = pools[0], options or Options(), bounds or Bounds()
    limit = bounds.limit_bytes(pool)
    subject = read_subject(config_or_recipe, pool.count, overrides, environment or {})
    asked = [options.recompute] if options.recompute is not None else ["none", "all"]
    if options.recompute is None and options.schedule and splits_backward(options.schedule):  # type: ignore[arg-type]
        asked = ["none"]
    rows = [
        _largest(subject, pool, replace(options, recompute=again), what, limit)
        for what in ("micro-batch", "sequence length")
        for again in asked
    ]
    return LargestPlan(subject.name, pool, tuple(rows), bounds)


def _largest(subject: Subject, pool: Pool, options: Options, what: What, limit: int) -> Largest:
    """Over all widths of tensor and pipeline; of equals the narrowest."""
    refused: list[ConfigError] = []
    best: tuple[int, Chosen] | None = None
    shortest = {"micro_batch": 1} if what == "micro-batch" else {}
    for task, *_ in candidates(subject, pool, replace(options, **shortest), refused):
        g = task.geometry
        widths = replace(options, tensor=g.tensor, pipeline=g.pipeline, expert=g.expert)

        def run(value: int, widths: Options = widths) -> Chosen | None:
            changed = {"micro_batch" if what == "micro-batch" else "sequence_length": value}
            found = next(candidates(subject, pool, replace(widths, **changed), refused), None)
            return (replace(found[0], limit=limit), found[1], found[2]) if found else None

        values = [value for value in _values(task, what) if best is None or value > best[0]]
        best = _last_fit(values, run) or best
    if best is None:
        return Largest(what, str(options.recompute), None, None)
    return Largest(what, str(options.recompute), best[0], fit_of(*best[1]))


def _values(task: Task, what: What) -> list[int]:
    """What an option can be for such widths, smallest first."""
    geometry, config = task.geometry, task.config
    if what == "micro-batch":
        share = task.batch.size // geometry.data
        return [n for n in range(1, share + 1) if share % n == 0]
    step = lcm(geometry.sequence_ranks, *(ratio for ratio in config.compress_ratios if ratio))
    least = geometry.context * config.sliding_window if geometry.context > 1 else 1
    return [n for n in range(step, config.max_position_embeddings + 1, step) if n >= least]


def _last_fit(values: list[int], run: Callable[[int], Chosen | None]) -> tuple[int, Chosen] | None:
    """The largest value with which a run of given widths fits: memory grows with it, so bisection finds it."""
    found, low, high = None, 0, len(values)
    while low < high:
        middle = (low + high) // 2
        chosen = run(values[middle])
        if chosen and _fits(chosen):
            found, low = (values[middle], chosen), middle + 1
        else:
            high = middle
    return found


def _fits(chosen: Chosen) -> bool:
    try:
        return chosen[0].memory(*chosen[1:]).fits
    except ConfigError:
        return False
