"""One operator on one shape: what it must give, the ways of computing it, and what each of them turned out to do.

A way is checked before it is timed. One that is wrong is reported with its error and gets no time.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from undertow.bench.ceilings import Ceilings
from undertow.bench.timing import measure
from undertow.bench.work import Work
from undertow.config.errors import InputError

OWN = 3e-3
"""Largest relative error of our own kernels in bfloat16."""
EXACT = 1e-5
"""The same of an operator whose inputs are all in float32."""
PEER = 2e-2
"""Largest relative error of a peer, which may round more in between; its error stands beside its time."""
_SLICE = 4096  # rows that become float64 at once

Run = Callable[[], Any]


class Absent(Exception):
    """A way that cannot be taken here; its text is the reason."""


@dataclass(frozen=True)
class Way:
    """One way of computing: `build` gives what is timed, or raises `Absent`; `limit` is the error that it may have."""

    build: Callable[[], Run]
    limit: float = PEER


@dataclass(frozen=True)
class Task:
    """`op` on `shape`: its least `work`, `error` of a result against the reference in float32, and the ways by name.

    A graph holds `calls` of what is mostly launch; what is not `captured` is timed call by call, as training calls it.
    """

    op: str
    shape: str
    work: Work
    error: Callable[[Any], float]
    ways: Mapping[str, Way]
    calls: int = 1
    captured: bool = True


def relative(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """`||found - expected|| / max(||expected||, least)`, infinite for a result of another shape."""
    if found.shape != expected.shape:
        return math.inf
    pairs = list(zip(found.detach().split(_SLICE), expected.detach().split(_SLICE), strict=True))
    apart = sum(float((x.double() - y.double()).square().sum()) for x, y in pairs) ** 0.5
    size = max(norm(expected), least)
    return apart / size if size else apart


def norm(x: Tensor) -> float:
    """Of all elements, in float64 a slice at a time."""
    return sum(float(part.double().square().sum()) for part in x.detach().split(_SLICE)) ** 0.5


def run_task(task: Task, ceilings: Ceilings, device: torch.device) -> list[dict[str, Any]]:
    """A row for every way, in the form of the result file."""
    floor, bound = task.work.floor(ceilings)
    rows = []
    for name, way in task.ways.items():
        row: dict[str, Any] = {"op": task.op, "shape": task.shape, "way": name}
        row |= {"floor_ms": floor, "bound": bound, "bytes": task.work.bytes, "flops_exact": task.work.exact}
        row |= {"flops_nominal": task.work.nominal, "error_limit": way.limit}
        rows.append(row | _taken(task, way, floor, device))
        gc.collect()
    return rows


def _taken(task: Task, way: Way, floor: float, device: torch.device) -> dict[str, Any]:
    try:
        run = way.build()
        found, peak = _watched(run, device)
        error = task.error(found)
        del found
        if not error <= way.limit:  # NaN is wrong too
            return {"status": "wrong", "error": error if math.isfinite(error) else str(error)}
        times = measure(run, device, captured=task.captured, calls=task.calls)
    except (Absent, InputError) as reason:
        return {"status": "absent", "reason": " ".join(str(reason).split())}
    except Exception as fault:  # a peer's or a kernel's own; the other rows are wanted all the same
        return {"status": "failed", "reason": " ".join(f"{type(fault).__name__}: {fault}".split())[:400]}
    rates = {
        f"tflops_{convention}": work / times.median / 1e9 if work else None
        for convention, work in (("exact", task.work.exact), ("nominal", task.work.nominal))
    }
    return {
        "status": "ok", "error": error, "ms": times.json(), "fraction_of_floor": floor / times.median, **rates,
        "gigabytes_per_second": task.work.bytes / times.median / 1e6, "peak_bytes": peak,
    }  # fmt: skip


def _watched(run: Run, device: torch.device) -> tuple[Any, int | None]:
    """The result of a run, and on a GPU the most bytes it had allocated on top of what was there, result included."""
    if device.type != "cuda":
        return run(), None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    found = run()
    torch.cuda.synchronize(device)
    return found, torch.cuda.max_memory_allocated(device) - before
