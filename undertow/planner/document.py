"""A plan as plain values: the names that other programs read."""

from __future__ import annotations

from typing import Any

from undertow.model.flops import Work
from undertow.planner.memory.model import RankMemory
from undertow.planner.plan import Plan
from undertow.planner.serving.decode_text import decode_document
from undertow.planner.serving.text import replicas_document


def plan_document(plan: Plan) -> dict[str, Any]:
    """What `undertow plan --json` writes: bytes, seconds and operations, one entry of `memory.ranks` a GPU.

    `rollout` is there with a second pool of GPUs alone.
    """
    parameters, memory, flops, time = plan.parameters, plan.memory, plan.flops, plan.time
    document: dict[str, Any] = {
        "parameters": {
            "main": parameters.main,
            "total": parameters.total,
            "active": parameters.active,
            "by_module": dict(parameters.by_module),
        },
        "memory": {"ranks": [_rank(rank) for rank in memory.ranks], "limit_bytes": memory.limit_bytes},
        "fits": plan.fits,
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
        "decode": decode_document(plan.task.config, plan.task.batch.sequence_length),
        "layout": plan.layout,
        "recompute": plan.recompute.json(),
        "uncalibrated": list(plan.uncalibrated),
    }
    if plan.rollout:
        document["rollout"] = replicas_document(plan.rollout)
    if plan.tuned:
        document["tuned"] = plan.tuned.json()
    return document


def _rank(rank: RankMemory) -> dict[str, Any]:
    return {
        "stage": rank.stage,
        "total_bytes": rank.total_bytes,
        "host_bytes": rank.host_bytes,
        "terms": [{"name": term.name, "bytes": term.bytes, "basis": term.basis} for term in rank.terms],
    }


def _work(work: Work) -> dict[str, float]:
    return {"forward": work.forward, "backward": work.backward}
