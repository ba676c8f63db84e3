"""The result file of a step over processes as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from undertow.bench.table import columns, step_table

_HEADS = ("rank", "peak GiB", "planned", "held", "slowest ms", "communication", "exposed", "of the step", "")


def ranks_table(result: dict[str, Any]) -> str:
    """The step of all ranks, each rank beside its plan, and a pipeline beside the planner's simulation."""
    setting, ranks = result["settings"][0], result["processes"]
    lines = [step_table(result), "", f"{ranks} processes: {result['layout']['axes']}; TFLOP/s are those of one, "]
    lines[-1] += f"tokens/s of one {setting['tokens_per_second_per_rank']:,.0f}"
    if beside := result["beside"]:
        lines[-1] += f", {beside['weak_scaling']:.1%} of the {beside['tokens_per_second']:,.0f} of a process alone"
    lines += ["", *columns([_HEADS, *(_rank(rank, result["plan"]["of"] == "peak") for rank in result["ranks"])])]
    plan, median = result["plan"], setting["ms"]["median"] / 1e3
    if plan["why"] is not None:
        lines.append(f"planned: {plan['of']}, for there is no plan: {plan['why']}")
    else:
        lines.append(f"planned: {plan['seconds']:.4g} s a step, measured {median:.4g}")
    if all(rank["communication"] is None for rank in result["ranks"]) and result["device"] == "cpu":
        lines.append("communication: there are no kernels on a CPU, and so no share of theirs")
    for rank in result["ranks"]:
        lines += _kinds(rank)
    if pipeline := result["pipeline"]:
        seconds = [pipeline[of]["seconds"] for of in ("measured", "simulated")]
        lines += [
            f"pipeline {pipeline['layout']}, {pipeline['schedule']}, {pipeline['microbatches']} micro-batches: "
            f"{seconds[0]:.4g} s, simulated {seconds[1]:.4g}; bubble of each rank {_shares(pipeline['measured'])}, "
            f"simulated {_shares(pipeline['simulated'])}"
        ]
    return "\n".join(lines)


def _rank(rank: dict[str, Any], compared: bool) -> tuple[str, ...]:
    found = rank["communication"]
    told = ("", "", "")
    if found is not None:
        told = f"{1e3 * found['seconds']:.4g} ms", f"{1e3 * found['exposed_seconds']:.4g} ms"
        told = (*told, f"{found['exposed_share']:.1%}")
    return (
        str(rank["rank"]),
        _gib(rank["peak_bytes"]),
        _gib(rank["planned_bytes"]),
        "" if rank["held_bytes"] is None else _gib(rank["held_bytes"]),
        f"{max(rank['ms']):,.4g}",
        *told,
        f"{rank['peak_bytes'] / rank['planned_bytes'] - 1:+.1%} to the plan" if compared else "",
    )


def _kinds(rank: dict[str, Any]) -> Sequence[str]:
    kinds = {} if rank["communication"] is None else rank["communication"]["by_collective"]
    told = [f"{name} {1e3 * of['exposed_seconds']:.4g} of {1e3 * of['seconds']:.4g} ms" for name, of in kinds.items()]
    return [f"exposed on rank {rank['rank']}: {', '.join(told)}"] if told else []


def _shares(timeline: dict[str, Any]) -> str:
    return ", ".join(f"{share:.1%}" for share in timeline["bubble"])


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f}"
