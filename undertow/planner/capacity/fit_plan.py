"""The answer to "how many GPUs": the smallest cluster of each GPU model as text and as plain values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from undertow.config.clusters import parse_cluster
from undertow.config.gpus import GPUS, Gpu
from undertow.config.model import ModelConfig
from undertow.config.schema import RunConfig
from undertow.planner.capacity.clusters import (
    LARGEST,
    WIDEST_EXPERT,
    Shortage,
    Smallest,
    smallest_clusters,
)
from undertow.planner.capacity.fit import unguarded, within
from undertow.planner.choice import Options
from undertow.planner.memory.model import GB, leaner
from undertow.planner.notes import gathered
from undertow.planner.subject import Subject, read_subject
from undertow.planner.table import columns
from undertow.planner.task import Task
from undertow.planner.timing.communication import expert_group
from undertow.planner.timing.fabric import fabric_of
from undertow.planner.tuner.tuning import Bounds


@dataclass(frozen=True)
class FitPlan:
    """The smallest clusters that train a model, up to `largest` GPUs. Built by `plan_fit`."""

    name: str
    rows: tuple[Smallest, ...]
    largest: int
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def fits(self) -> bool:
        """Whether there is a cluster for any of the GPU models."""
        return any(row.fit for row in self.rows)

    @property
    def refusal(self) -> str | None:
        """In one sentence, what does not fit, of the row that comes nearest."""
        if self.fits:
            return None
        lacking = [(row, row.shortage) for row in self.rows if row.shortage]
        row, short = min(lacking, key=lambda each: each[1].rank.total_bytes / each[1].limit_bytes)
        return (
            f"{self.name} fits no cluster of up to {self.largest:,} GPUs: {_told(row, short)}; take GPUs with more "
            f"memory, a shorter sequence, context parallelism or {leaner(short.term)}"
        )

    @property
    def uncalibrated(self) -> tuple[str, ...]:
        """In sentences, what no measurement covers, each once, with the rows it is about where not all are."""
        found = gathered(
            {(row.gpu.name, row.recompute): (row.fit.task, row.fit.memory) for row in self.rows if row.fit}
        )
        return (*unguarded(self.bounds), *dict.fromkeys(found))

    def json(self) -> dict[str, Any]:
        """The answer as plain values under stable names."""
        return {
            "fit": [_document(row) for row in self.rows],
            "largest_gpus": self.largest,
            "largest_expert": WIDEST_EXPERT,
            "margin": self.bounds.margin,
            "fits": self.fits,
            "refusal": self.refusal,
            "uncalibrated": list(self.uncalibrated),
        }

    def __str__(self) -> str:
        return "\n".join(_text(self))


def plan_fit(
    config_or_recipe: str | Path | ModelConfig | RunConfig,
    gpus: str | None = None,
    options: Options | None = None,
    *,
    largest: int = LARGEST,
    bounds: Bounds | None = None,
    own_gpus: Sequence[Gpu] = (),
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> FitPlan:
    """The smallest clusters of GPU models (`MI355X`, `MI355X+H200`, or None for all that are known) that train a model.

    What `options` leave open is chosen as for a plan; the batch is 8 sequences a GPU, or the recipe's. Raises
    `ConfigError` for what cannot be; where nothing fits, the answer says so (`fits`, `refusal`). `bounds` say how much
    of a GPU's memory may be taken: 95 % unasked.
    """
    bounds = bounds or Bounds()
    if gpus is None:
        replaced = {gpu.name.lower() for gpu in own_gpus}
        known = [*own_gpus, *(gpu for gpu in GPUS if gpu.name.lower() not in replaced)]
    else:
        known = list(dict.fromkeys(pool.gpu for pool in parse_cluster(gpus, own_gpus)))

    def subject(count: int) -> Subject:
        return read_subject(config_or_recipe, count, overrides, environment or {})

    rows = smallest_clusters(subject, known, options or Options(), largest=largest, bounds=bounds)
    return FitPlan(subject(1).name, rows, largest, bounds)


def names_gpus_alone(gpus: str | None) -> bool:
    """Whether a string of GPUs gives models without a number of them."""
    return gpus is None or not re.search(r"(^|\+)\s*\d", gpus)


def _told(row: Smallest, short: Shortage) -> str:
    return (
        f"on {short.gpus}x{row.gpu.name}, recomputing {row.recompute}, a GPU of pipeline rank {short.rank.stage} needs "
        f"{short.rank.total_bytes / GB:,.1f} of {short.limit_bytes / GB:,.1f} GB, the most for '{short.term.name}', "
        f"{short.term.gb:,.1f} GB"
    )


def _text(plan: FitPlan) -> list[str]:
    found = [row.fit for row in plan.rows if row.fit]
    lines = [f"{plan.name}: the smallest clusters that train it, up to {plan.largest:,} GPUs"]
    if found:
        task = found[0].task
        sizes = {fit.task.batch.size for fit in found}
        each = {fit.task.batch.size / fit.task.geometry.gpus for fit in found}
        batch = f"{task.batch.size:,} sequences a" if len(sizes) == 1 else f"{each.pop():g} sequences a GPU and"
        lines.append(
            f"  {batch} step, of {task.batch.sequence_length:,} tokens, micro-batch {task.batch.micro_batch}, "
            f"schedule {task.schedule}, state {task.profile.name}"
        )
    lines.append(f"  {within(plan.bounds)}; expert parallelism up to {WIDEST_EXPERT} was tried, * crosses machines")
    head = "GPU,GPUs,recomputed,tensor,pipeline,expert,implementation,peak GB,of,s/iteration,tokens/s/GPU"
    rows: list[list[str]] = [[str(title) for title in head.split(",")]]
    for row in plan.rows:
        if row.fit is None:
            rows.append([row.gpu.name, "none", row.recompute, *["-"] * 8])
            continue
        fit, g = row.fit, row.fit.task.geometry
        rows.append([
            row.gpu.name, f"{g.gpus:,}", row.recompute, str(g.tensor), str(g.pipeline), _expert(fit.task),
            fit.task.microbatch.implementation, f"{fit.memory.peak.total_bytes / GB:,.1f}",
            f"{fit.memory.limit_bytes / GB:,.1f}",
            f"{fit.seconds:,.2f}", f"{fit.tokens_per_second_per_gpu:,.0f}",
        ])  # fmt: skip
    lines += columns(rows, right=(1, 3, 4, 5, 7, 8, 9, 10))
    lines += ["", "what keeps fewer from fitting"]
    lines += columns(_shortages(plan), right=(1, 3, 4, 5, 7))
    lines += ["", "layouts"]
    spelt = dict.fromkeys((f"{fit.task.geometry.pipeline}", str(fit.layout)) for fit in found)
    lines += columns([list(each) for each in spelt], right=(0,)) if spelt else ["  none"]
    return [*lines, "", "not calibrated", *(f"  {note}" for note in plan.uncalibrated)]


def _expert(task: Task) -> str:
    """Its width, marked where the ranks that share the experts are in several machines."""
    group = expert_group(task.geometry)
    return f"{task.geometry.expert}{' *' if fabric_of(task.pool.gpu).inside(group) < group.ranks else ''}"


def _shortages(plan: FitPlan) -> list[list[str]]:
    rows = [["GPU", "GPUs", "recomputed", "rank", "needs GB", "of", "largest term", "GB"]]
    for row in plan.rows:
        if short := row.shortage:
            sizes = [f"{size / GB:,.1f}" for size in (short.rank.total_bytes, short.limit_bytes)]
            place = [row.gpu.name, f"{short.gpus:,}", row.recompute, str(short.rank.stage)]
            rows.append([*place, *sizes, short.term.name, f"{short.term.gb:,.1f}"])
    return rows


def _document(row: Smallest) -> dict[str, Any]:
    document: dict[str, Any] = {"gpu": row.gpu.name, "recompute": row.recompute, "gpus": None, "shortage": None}
    if fit := row.fit:
        task, g = fit.task, fit.task.geometry
        document |= {
            "gpus": g.gpus,
            "tensor": g.tensor,
            "pipeline": g.pipeline,
            "expert": g.expert,
            "context": g.context,
            "layout": str(fit.layout),
            "schedule": task.schedule,
            "implementation": task.microbatch.implementation,
            "state": task.profile.name,
            "batch_size": task.batch.size,
            "micro_batch_size": task.batch.micro_batch,
            "sequence_length": task.batch.sequence_length,
            "stage": fit.memory.peak.stage,
            "peak_bytes": fit.memory.peak.total_bytes,
            "limit_bytes": fit.memory.limit_bytes,
            "seconds_per_iteration": fit.seconds,
            "tokens_per_second_per_gpu": fit.tokens_per_second_per_gpu,
        }
    if short := row.shortage:
        document["shortage"] = {
            "gpus": short.gpus,
            "stage": short.rank.stage,
            "needed_bytes": short.rank.total_bytes,
            "limit_bytes": short.limit_bytes,
            "term": short.term.name,
            "term_bytes": short.term.bytes,
        }
    return document
