"""A plan as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from undertow.model.parameters import closed_counts
from undertow.planner.memory.model import GB, GIB, RankMemory
from undertow.planner.serving.decode_text import decode_text
from undertow.planner.serving.text import replicas_text
from undertow.planner.table import columns
from undertow.planner.tuner.text import tuned_text

if TYPE_CHECKING:
    from undertow.planner.plan import Plan
    from undertow.planner.serving.replicas import Replicas

_SENDS_MUCH = 0.2  # share of an iteration

_TERMS = 3
"""Terms of memory that a line names."""

_UNITS = ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"))


def plan_text(plan: Plan) -> str:
    """Parameters, memory of every stage, operations in both conventions, time and what is not calibrated."""
    parts = [_head(plan), _parameters(plan), _memory(plan), _flops(plan), _time(plan)]
    parts.append(decode_text(plan.task.config, plan.task.batch.sequence_length))
    if plan.rollout:
        parts.append(_rollout(plan.rollout))
    if plan.tuned:
        parts.append(tuned_text(plan.tuned))
    if plan.uncalibrated:
        parts.append(["not calibrated", *(f"  {note}" for note in plan.uncalibrated)])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _head(plan: Plan) -> list[str]:
    task, geometry, batch = plan.task, plan.task.geometry, plan.task.batch
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    own = task.microbatch.implementation == "reference" and task.microbatch.kernels
    return [
        f"{task.name} on {task.pool}{f' + {plan.rollout.pool}' if plan.rollout else ''}: {verdict}",
        f"  tensor {geometry.tensor}, pipeline {geometry.pipeline}, expert {geometry.expert}, context "
        f"{geometry.context}; data {geometry.data}, copies of each expert {geometry.expert_data}",
        f"  {batch.size:,} sequences of {batch.sequence_length:,} tokens, micro-batch {batch.micro_batch}: "
        f"{task.microbatches:,} microbatches",
        f"  layout {plan.layout}, schedule {task.schedule}, recomputed layers {plan.recompute}",
        f"  implementation {task.microbatch.implementation}{', in kernels' * own}, state {task.profile.name}",
    ]


def _parameters(plan: Plan) -> list[str]:
    counts, config = plan.parameters, plan.task.config
    names = {"shared": "shared query path, as released", "own_rank": "own query path, the published AMD variant"}
    other = "own_rank" if config.indexer == "shared" else "shared"
    swapped = closed_counts(config.model_copy(update={"indexer": other}))
    rows = [
        ["total", _billions(counts.total), f"indexer {config.indexer}: {names[config.indexer]}"],
        ["", _billions(swapped.total), f"with indexer {other}: {names[other]}"],
        ["without MTP", _billions(counts.main), ""],
        ["active", _billions(counts.active), f"a token, and {_billions(counts.by_module['head'])} of the LM head"],
    ]
    modules = sorted(((size, name) for name, size in counts.by_module.items() if size), reverse=True)
    rows += [[name.replace("_", " "), _billions(size), f"{size / counts.total:.2%}"] for size, name in modules]
    return ["parameters", *columns(rows, right=(1,))]


def _memory(plan: Plan) -> list[str]:
    limit, each = plan.memory.limit_bytes, plan.memory.ranks_per_stage
    name = "pipeline rank" if plan.task.chunks > 1 else "stage"
    rows = [[name, "GB", "GiB", "free GB", "largest terms and the rest, GB (e: estimated)"]]
    digits = 1 if plan.memory.peak.total_bytes >= 10 * GB else 3
    for stage in plan.memory.stages:
        total = stage.total_bytes
        sizes = (_gb(total, digits), _gib(total, digits), _gb(limit - total, digits))
        rows.append([str(stage.stage), *sizes, _largest(stage, digits)])
    return [
        f"memory of a GPU, {_gb(limit)} GB ({_gib(limit)} GiB) at most; {_gpus(each)} in each {name}",
        *columns(rows, right=(1, 2, 3)),
        *_host(plan),
    ]


def _host(plan: Plan) -> list[str]:
    most = max(stage.host_bytes for stage in plan.memory.stages)
    if not most:
        return []
    machine = plan.memory.machine_host_bytes()
    return [f"  on the host: optimizer state, {_gb(most)} GB a GPU and {_gb(machine)} GB a machine of 8 GPUs at most"]


def _largest(rank: RankMemory, digits: int) -> str:
    """Terms by size and the sum of those that are not named; what is printed adds up to the printed total."""
    terms = sorted(rank.terms, key=lambda term: -term.bytes)
    unit = GB // 10**digits
    left = round(rank.total_bytes / unit) - sum(round(term.bytes / unit) for term in terms[:_TERMS])
    named = [(term.name, term.bytes, term.basis) for term in terms[:_TERMS]]
    if rest := terms[_TERMS:]:
        estimated = any(term.basis == "estimated" for term in rest)
        named.append(("rest", left * unit, "estimated" if estimated else "measured"))
    return ", ".join(f"{name} {_gb(size, digits)}{' e' * (basis == 'estimated')}" for name, size, basis in named)


def _gpus(alike: int) -> str:
    return "1 GPU" if alike == 1 else f"{alike:,} GPUs, all alike,"


def _flops(plan: Plan) -> list[str]:
    flops = plan.flops
    scale, unit = next((each for each in _UNITS if flops.algorithmic_per_iteration >= 10 * each[0]), _UNITS[-1])
    rows = [["", "algorithmic", "forward", "backward", "reported"]]
    for term, work in flops.terms.algorithmic.items():
        parts = (work.total, work.forward, work.backward, flops.terms.reported[term].total)
        rows.append([term, *(f"{part / scale:,.2f}" for part in parts)])
    ahead = sum(work.forward for work in flops.terms.algorithmic.values())
    whole = flops.algorithmic_per_iteration
    sums = (whole, ahead, whole - ahead, flops.reported_per_iteration)
    rows.append(["all", *(f"{part / scale:,.2f}" for part in sums)])
    return [
        f"operations of an iteration, {unit}, with the {flops.terms.indexer} indexer",
        *columns(rows, right=(1, 2, 3, 4)),
    ]


def _time(plan: Plan) -> list[str]:
    time, timeline = plan.time, plan.timeline
    algorithmic, reported = time.tflops_per_gpu
    waits = [f"{max(0.0, timeline.bubble_fraction(rank)):.0%}" for rank in range(len(timeline.ranks))]
    last = max(float(rank.step) for rank in timeline.ranks)
    ends = "clipping, the optimizer's step, " if plan.task.calibration.of_operators else ""
    ends += "sums of gradients and gathers of weights"
    sums = [f"  of them {_seconds(last)} s at the end for {ends}"] if last else []
    share = plan.task.sending_seconds(plan.stages, plan.recompute) / time.seconds_per_iteration
    if share > _SENDS_MUCH:
        more = "" if plan.tuned else "; --tune looks for widths that send less"
        sums.append(f"  {share:.0%} of an iteration goes to gathering weights, summing gradients and exchanges{more}")
    return [
        f"time, by rates {time.calibration}",
        f"  {_seconds(time.seconds_per_iteration)} s an iteration, {time.tokens_per_second_per_gpu:,.0f} tokens/s/GPU",
        *sums,
        f"  {algorithmic:,.1f} TFLOP/s/GPU algorithmic, {reported:,.1f} reported",
        f"  bubbles by pipeline rank: {', '.join(waits)}",
    ]


def _rollout(replicas: Replicas) -> list[str]:
    verdict = "" if replicas.fits else ": DOES NOT FIT"
    return [f"rollout on {replicas.pool}{verdict}", *replicas_text(replicas)]


def _billions(count: int) -> str:
    return f"{count / 1e9:,.2f} B" if count >= 1e7 else f"{count / 1e6:,.2f} M"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 1000 else f"{seconds:.4g}"


def _gb(size: int, digits: int = 1) -> str:
    return f"{size / GB:,.{digits}f}"


def _gib(size: int, digits: int = 1) -> str:
    return f"{size / GIB:,.{digits}f}"
