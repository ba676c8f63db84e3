"""A plan as plain values: the names that other programs read."""

from __future__ import annotations

from typing import Any

from undertow.model.flops import Work
from undertow.planner.memory.model import RankMemory
from undertow.planner.plan import Plan
from undertow.planner.serving.text import replicas_document


def plan_document(plan: Plan) -> dict[str, Any]:
    """What `undertow plan --json` writes: bytes, seconds and operations, one entry of `memory.ranks` a GPU.

    Entries of GPUs of one stage are one object. `rollout` is there with a second pool of GPUs alone.
    """
    parameters, memory, flops, time = plan.parameters, plan.memory, plan.flops, plan.time
    document: dict[str, Any] = {
        **_settings(plan),
        "parameters": {
            "main": parameters.main,
            "total": parameters.total,
            "active": parameters.active,
            "by_module": dict(parameters.by_module),
        },
        "memory": {
            "ranks": [rank for stage in memory.stages for rank in [_rank(stage)] * memory.ranks_per_stage],
            "limit_bytes": memory.limit_bytes,
        },
        "fits": plan.fits,
        "refusal": plan.refusal,
        "flops": {
            "algorithmic_per_iteration": flops.algorithmic_per_iteration,
            "reported_per_iteration": flops.reported_per_iteration,
            "terms": {
                term: {"algorithmic": _work(work), "reported": _work(flops.terms.reported[term])}
                for term, work in flops.terms.algorithmic.items()
            },
        },
        "time": {
            "seconds_per_iteration": time.seconds_per_iteration,
            "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
            "calibration": time.calibration,
        },
        "bubbles": [max(0.0, plan.timeline.bubble_fraction(rank)) for rank in range(len(plan.timeline.ranks))],
        "decode": plan.decode,
        "layout": plan.layout,
        "recompute": plan.recompute.json(),
        "uncalibrated": list(plan.uncalibrated),
    }
    if plan.rollout:
        document["rollout"] = replicas_document(plan.rollout)
    if plan.tuned:
        document["tuned"] = plan.tuned.json()
    return document


def _settings(plan: Plan) -> dict[str, Any]:
    """What is planned: the model or recipe as given, and all that was stated or chosen."""
    task, geometry, batch = plan.task, plan.task.geometry, plan.task.batch
    widths = ("tensor", "pipeline", "expert", "context", "data", "expert_data")
    return {
        "model": task.name,
        "gpu": task.pool.gpu.name,
        "gpus": geometry.gpus,
        "geometry": {name: getattr(geometry, name) for name in widths},
        "batch": {
            "size": batch.size,
            "micro_batch": batch.micro_batch,
            "sequence_length": batch.sequence_length,
            "microbatches": task.microbatches,
        },
        "schedule": task.schedule,
        "implementation": task.microbatch.implementation,
        "state": task.profile.name,
    }


def _rank(rank: RankMemory) -> dict[str, Any]:
    return {
        "stage": rank.stage,
        "total_bytes": rank.total_bytes,
        "host_bytes": rank.host_bytes,
        "terms": [{"name": term.name, "bytes": term.bytes, "basis": term.basis} for term in rank.terms],
    }


def _work(work: Work) -> dict[str, float]:
    return {"forward": work.forward, "backward": work.backward}
