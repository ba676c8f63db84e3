"""What was planned of a step over ranks, in the terms of what is measured: memory of each, seconds, and the bubble."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from undertow.config.errors import UndertowError
from undertow.config.gpus import find_gpu
from undertow.config.schema import RunConfig
from undertow.planner.pipeline.measured import measured_timeline
from undertow.planner.pipeline.schedules import Pace, build_schedule
from undertow.planner.pipeline.timeline import StageTime, Timeline, simulate
from undertow.planner.plan import plan
from undertow.train.fit import lasting_bytes


def planned_step(config: RunConfig, ranks: int, device_name: str) -> dict[str, Any]:
    """The plan of a run on so many GPUs of the name that torch gives them, or of `cpu`.

    `bytes` has the peak of each rank, `seconds` are those of a step. Where there is no plan, for the reason in `why`,
    `bytes` are those of weights, buffers and optimizer state alone, which `of` says, and `seconds` is None.
    """
    gpu = find_gpu(device_name)
    try:
        if gpu is None:
            raise UndertowError(f"the planner knows no rates of {device_name}")
        found = plan(config, f"{ranks}x{gpu.name}")
    except UndertowError as error:
        lasting = lasting_bytes(config, ranks, device_name != "cpu")
        of = "weights, buffers and optimizer state, on average of the stages"
        return {"of": of, "bytes": [lasting] * ranks, "seconds": None, "why": str(error), "notes": []}
    return {
        "of": "peak",
        "bytes": [rank.total_bytes for rank in found.memory.ranks],
        "seconds": found.time.seconds_per_iteration,
        "why": None,
        "notes": list(found.uncalibrated),
    }


def timelines(document: Mapping[str, Any]) -> dict[str, Any]:
    """A measured step of a pipeline, `timeline_document`, beside the planner's simulation of it: `bubble` of every
    rank, the share of the step's passes in which it waits, and `seconds` of the passes.

    The simulation takes what each operation took in the mean of its stage, and no time for what is sent.
    """
    measured, simulated = measured_timeline(document), _simulated(document)
    return {
        "schedule": document["schedule"],
        "layout": document["layout"],
        "microbatches": document["microbatches"],
        "measured": _told(measured),
        "simulated": _told(simulated),
    }


def _told(timeline: Timeline) -> dict[str, Any]:
    ranks = range(len(timeline.ranks))
    return {"seconds": float(timeline.seconds), "bubble": [timeline.bubble_fraction(rank) for rank in ranks]}


def _simulated(document: Mapping[str, Any]) -> Timeline:
    name, ranks, microbatches = document["schedule"], document["ranks"], document["microbatches"]
    spent: dict[int, dict[str, float]] = {}
    for kind, _, stage, start, end in (each for of_rank in document["operations"] for each in of_rank):
        of_stage = spent.setdefault(stage, dict.fromkeys("FBW", 0.0))
        of_stage[kind] += (end - start) / microbatches
    each = [spent[stage] for stage in range(len(spent))]
    times = [StageTime(of["F"], of["B"] + of["W"], of["W"]) for of in each]
    # The order of ZBV follows the pace, in whole numbers.
    pace = [max(1, round(1e6 * sum(of[kind] for of in each) / len(each))) for kind in "FBW"]
    schedule = build_schedule(name, ranks, microbatches, len(each) // ranks, cast(Pace, tuple(pace)))
    return simulate(schedule, times)
