"""A plan as plain values for a page that is looked at: what `--json` has, and all that is drawn."""

from __future__ import annotations

from typing import Any

from undertow.config.gpus import Gpu
from undertow.model.parameters import Counts, closed_counts
from undertow.planner.document import plan_document
from undertow.planner.pipeline.tracks import tracks
from undertow.planner.plan import Plan
from undertow.planner.timing.costs import stage_times
from undertow.planner.timing.rates import Rates
from undertow.planner.timing.roofline import Operation, operations
from undertow.planner.tuner.tuned import Tuned, Way

_KINDS = {"swa": "sliding window", "csa": "compressed sparse", "hca": "heavily compressed"}


def page_document(plan: Plan) -> dict[str, Any]:
    """Values of a page of the plan, JSON-serialisable: bytes, seconds, operations and names."""
    document = plan_document(plan)
    return {
        "name": plan.task.name,
        "cluster": str(plan.task.pool),
        "fits": plan.fits,
        "refusal": plan.refusal,
        "settings": _settings(plan),
        "time": _time(plan),
        "uncalibrated": list(plan.uncalibrated),
        "parameters": _parameters(plan),
        "memory": _memory(plan),
        "flops": document["flops"],
        "tracks": _tracks(plan),
        "roofline": _roofline(plan),
        "tuned": _tuned(plan.tuned) if plan.tuned else None,
        "rollout": document.get("rollout"),
    }


def _settings(plan: Plan) -> dict[str, Any]:
    task, geometry, batch = plan.task, plan.task.geometry, plan.task.batch
    return {
        "tensor": geometry.tensor,
        "pipeline": geometry.pipeline,
        "expert": geometry.expert,
        "context": geometry.context,
        "data": geometry.data,
        "expert_data": geometry.expert_data,
        "sequences": batch.size,
        "sequence_length": batch.sequence_length,
        "micro_batch": batch.micro_batch,
        "microbatches": task.microbatches,
        "layout": plan.layout,
        "schedule": task.schedule,
        "recomputed": str(plan.recompute),
        "implementation": task.microbatch.implementation,
        "state": task.profile.name,
    }


def _time(plan: Plan) -> dict[str, Any]:
    time = plan.time
    algorithmic, reported = time.tflops_per_gpu
    return {
        "seconds_per_iteration": time.seconds_per_iteration,
        "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
        "tflops_algorithmic": algorithmic,
        "tflops_reported": reported,
        "peak_share": algorithmic * 1e12 / plan.task.pool.gpu.bf16,
        "calibration": time.calibration,
    }


def _parameters(plan: Plan) -> dict[str, Any]:
    """Counts with the indexer of the plan first and the other variant's after it."""
    config = plan.task.config
    other = "own_rank" if config.indexer == "shared" else "shared"
    variants = {
        config.indexer: plan.parameters,
        other: closed_counts(config.model_copy(update={"indexer": other})),
    }
    return {
        "by_module": dict(plan.parameters.by_module),
        "indexers": [{"name": name, **_sums(counts)} for name, counts in variants.items()],
    }


def _sums(counts: Counts) -> dict[str, int]:
    return {"total": counts.total, "main": counts.main, "active": counts.active, "head": counts.by_module["head"]}


def _memory(plan: Plan) -> dict[str, Any]:
    memory = plan.memory
    return {
        "limit_bytes": memory.limit_bytes,
        "gpus_per_stage": memory.ranks_per_stage,
        "chunks": plan.task.chunks,
        "stages": [
            {
                "stage": stage.stage,
                "total_bytes": stage.total_bytes,
                "host_bytes": stage.host_bytes,
                "terms": [{"name": term.name, "bytes": term.bytes, "basis": term.basis} for term in stage.terms],
            }
            for stage in memory.stages
        ],
    }


def _tracks(plan: Plan) -> dict[str, Any]:
    """The timeline; a rank's static bytes are what its total leaves above the most that microbatches hold."""
    plain, again = (stage_times(plan.task.times, plan.stages, *given) for given in ((), (plan.recompute,)))
    recomputed = [float(a.backward - p.backward) for p, a in zip(plain, again, strict=True)]
    pairs = zip(plan.memory.stages, plan.timeline.ranks, strict=True)
    static = [max(0, stage.total_bytes - rank.peak_bytes) for stage, rank in pairs]
    return tracks(plan.timeline, recomputed, static)


def _roofline(plan: Plan) -> dict[str, Any]:
    return {
        "gpu": _ceilings(plan.task.pool.gpu),
        "rates": _rates(plan.task.rates),
        "kinds": {kind: name for kind, name in _KINDS.items() if kind in _kinds(plan)},
        "operations": [_operation(each) for each in operations(plan.task)],
    }


def _kinds(plan: Plan) -> set[str]:
    config = plan.task.config
    return {config.kind(layer) for layer in range(len(config.compress_ratios))}


def _ceilings(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "bf16": gpu.bf16,
        "bandwidth": gpu.bandwidth,
        "sources": {name: gpu.source(name) for name in ("bf16", "bandwidth")},
    }


def _rates(rates: Rates) -> dict[str, Any]:
    figures = {"matrix": rates.matrix_tflops, "heads": rates.head_tflops}
    return {name: {"rate": figure.value * 1e12, "mark": figure.mark} for name, figure in figures.items()}


def _operation(operation: Operation) -> dict[str, Any]:
    return {
        "name": operation.name,
        "count": operation.count,
        "flops": operation.flops,
        "bytes": operation.bytes,
        "intensity": operation.intensity,
        "rate": operation.rate,
        "seconds": operation.seconds,
    }


def _tuned(tuned: Tuned) -> dict[str, Any]:
    """With what is computed again as text, too, and the frontier, which is searched for here."""
    return {
        **tuned.json(),
        **_again(tuned.best),
        "start": tuned.start.json() | _again(tuned.start),
        "runners_up": [way.json() | _again(way) for way in tuned.runners_up],
        "frontier": [point.json() | _again(point.way) for point in tuned.frontier],
    }


def _again(way: Way) -> dict[str, str]:
    return {"recomputed": str(way.recompute)}
