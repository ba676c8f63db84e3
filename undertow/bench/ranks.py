"""Training steps over processes: the rates of all, and memory and exposed communication of each, beside the plan."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from undertow.bench.environment import environment
from undertow.bench.exposed import exposed_communication
from undertow.bench.planned import planned_step, timelines
from undertow.bench.settings import build, default_preset, device_for, resolve_step
from undertow.bench.step import SETTLING, UNITS, Column, Follow, allocated, figures, profiled, timed_step, write_trace
from undertow.config.errors import InputError
from undertow.config.world import World
from undertow.ops.registry import summary
from undertow.parallel.mesh import build_axes
from undertow.parallel.start import anyone, everyone
from undertow.train.loop import Trainer

_UNITS = UNITS | {
    "ms": "milliseconds a step, of the rank that took longest",
    "tflops": "10^12 operations a second, of one rank",
    "peak_memory": "of the rank that held most",
    "bubble": "share of the passes of a step in which a rank of the pipeline waits",
}


def bench_ranks(
    preset: str | None,
    words: Sequence[str],
    steps: int,
    losses: int,
    trace: Path | None,
    beside: Path | None,
    variables: Mapping[str, str],
    world: World,
    follow: Follow = lambda done, of, what: None,
) -> dict[str, Any]:
    """Measure `steps` steps of `preset` (None: one that suits the device) with KEY=VALUE `words` over the processes of
    `world`, which have met; each of them calls this, and gets the content of the result file.

    At least `losses` steps are taken. With `trace` one more is profiled on every rank, for the share of communication;
    rank 0 writes its own there. `beside` is the result file of one process, whose rate is compared.
    """
    alone = None if beside is None else rate_of_one(beside)
    taken = max(SETTLING + steps, losses)
    total = taken + (trace is not None)
    device = device_for(words, variables, world)
    preset = preset or default_preset(device)
    column = Column("as given", resolve_step(preset, words, total, device.type == "cuda", variables))
    follow(0, taken, f"building rank {world.rank} of {world.ranks}")
    before = allocated(device)
    trainer, _ = build(column.resolved, total, world)
    column.trainer, column.held = trainer, allocated(device) - before
    column.operators, column.calls = summary(trainer.model.ops.choices.values()), trainer.model.ops.calls
    for step in range(taken):
        anyone(False)  # the ranks begin together, so that the longest is the step's
        timed_step(column, device)
        follow(step + 1, taken, f"{column.ms[-1]:,.0f} ms")
    own: dict[str, Any] = {"ms": column.ms, "peak": column.peak, "held": column.held if device.type == "cuda" else None}
    own["communication"] = None if trace is None else _communication(trainer, trace, world)
    every = [json.loads(told) for told in everyone(json.dumps(own))]
    column.ms = [max(of_step) for of_step in zip(*(each["ms"] for each in every), strict=True)]
    column.peak = max(each["peak"] for each in every)
    return _document(preset, column, device, world, every, trainer, alone)


def rate_of_one(path: Path) -> float:
    """Tokens/s in the result file of `undertow bench step` in one process. Raises `InputError` for another file."""
    what = "the result file of undertow bench step in one process"
    try:
        result = json.loads(path.read_text())
        rate, ranks = float(result["settings"][0]["tokens_per_second"]), result.get("processes", 1)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"--beside {path}: {what} is expected ({type(error).__name__}: {error})") from None
    if result.get("kind") != "step" or ranks != 1:
        raise InputError(f"--beside {path}: {what} is expected, this is one of another kind, or of {ranks} processes")
    return rate


def _communication(trainer: Trainer, trace: Path, world: World) -> dict[str, Any] | None:
    """Profile one step on every rank; None on a CPU, where there are no kernels."""
    gpu = trainer.model.device.type == "cuda"
    anyone(False)
    # Of a GPU kernels alone: to record the calls of the host would hold back the launches, for which others wait.
    found, seconds = profiled(trainer, [ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU])
    with TemporaryDirectory() as folder:
        path = trace if world.rank == 0 else Path(folder) / "trace.json"
        if gpu or world.rank == 0:
            write_trace(found, path)
        return exposed_communication(_events(path), seconds) if gpu else None


def _events(path: Path) -> list[dict[str, Any]]:
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]


def _document(
    preset: str, column: Column, device: torch.device, world: World, every: Sequence[dict[str, Any]], trainer: Trainer,
    alone: float | None,
) -> dict[str, Any]:  # fmt: skip
    config, gpu = column.resolved.config, device.type == "cuda"
    axes = build_axes(config.parallel, world.ranks, model=config.model)
    plan = planned_step(config, world.ranks, torch.cuda.get_device_name(device) if gpu else "cpu")
    setting = figures(column, device, world.ranks)
    each = setting["tokens_per_second"] / world.ranks
    setting["tokens_per_second_per_rank"] = each
    measured = None if trainer.pipeline is None else trainer.pipeline.timeline
    return {
        "kind": "step",
        "environment": environment(),
        "device": device.type,
        "preset": preset,
        "processes": world.ranks,
        "layout": {"axes": str(axes), "parallel": config.parallel.model_dump(mode="json")},
        "units": _UNITS,
        "settings": [setting],
        "ranks": [
            {
                "rank": rank,
                "peak_bytes": of["peak"],
                "planned_bytes": plan["bytes"][rank],
                "held_bytes": of["held"],
                "ms": of["ms"][column.settling :],
                "communication": of["communication"],
            }
            for rank, of in enumerate(every)
        ],
        "plan": {name: plan[name] for name in ("of", "seconds", "why", "notes")},
        "pipeline": None if measured is None else timelines(measured) | {"timeline": measured},
        "beside": None if alone is None else {"tokens_per_second": alone, "weak_scaling": each / alone},
    }
