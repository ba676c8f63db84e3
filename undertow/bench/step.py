"""Whole training steps of a preset: time, rates, memory and losses of one setting, or of two in turns."""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from undertow.bench.environment import environment
from undertow.bench.settings import build, default_preset, device_for, resolve_step, value_of
from undertow.config.errors import InputError
from undertow.config.gpus import find_gpu
from undertow.config.resolve import Resolved
from undertow.model.flops import flops_per_token
from undertow.ops.calls import Calls
from undertow.ops.registry import summary
from undertow.train.figures import peak_memory
from undertow.train.fit import memory_of, step_peak
from undertow.train.loop import Trainer

SETTLING = 3
"""Steps at the beginning whose time does not count: kernels are compiled, state is allocated."""

UNITS = {
    "ms": "milliseconds a step",
    "losses": "nats per token",
    "gradient_norms": "before clipping, the indexers' gradients apart",
    "tflops": "10^12 operations a second",
    "calls": "of operators that a kernel was chosen for, by the backend that took them, in all steps",
}

Follow = Callable[[int, int, str], None]


@dataclass
class Column:
    """One setting while it is measured: milliseconds, loss and gradient norm of each step so far, bytes it holds, and
    its peak. The first `settling` times do not count."""

    name: str
    resolved: Resolved
    trainer: Trainer | None = None
    ms: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    settling: int = SETTLING
    held: int = 0
    peak: int = 0
    operators: str = ""
    calls: Calls = field(default_factory=Calls)

    @property
    def batch(self) -> tuple[int, int]:
        """Sequences of a step and tokens of a sequence."""
        train = self.resolved.config.train
        return train.batch_size, train.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return math.prod(self.batch)

    def given(self) -> dict[str, Any]:
        """The keys that differ from the preset and the defaults, with their values."""
        own = {key for key, source in self.resolved.sources.items() if not source.startswith(("default", "preset "))}
        return {key: value_of(self.resolved.config, key) for key in sorted(own - {"model.preset"})}


def bench_step(
    preset: str | None,
    words: Sequence[str],
    against: Sequence[str],
    steps: int,
    losses: int,
    trace: Path | None,
    variables: Mapping[str, str],
    follow: Follow = lambda done, of, what: None,
    keep: Callable[[dict[str, Any]], None] = lambda part: None,
) -> dict[str, Any]:
    """Measure `steps` steps of `preset` (None: one that suits the device) with KEY=VALUE `words`, and again with those
    of `against`, from the same seed.

    Both take at least `losses` steps. Their steps alternate where both fit into the memory, else one setting follows
    the other. `trace` is written with one more step of the first. Returns the content of the result file; `keep` is
    called with that of the steps so far where it is interrupted.
    """
    taken = max(SETTLING + steps, losses)
    total = taken + (trace is not None)
    device = device_for(words, variables)
    gpu, preset = device.type == "cuda", preset or default_preset(device)
    first = resolve_step(preset, words, total, gpu, variables)
    found = [Column("as given", first)]
    if against:
        second = resolve_step(preset, [*words, *against], total, gpu, variables)
        if second.config == first.config:
            raise InputError(f"--against {' '.join(against)}: both settings are the same; give a key another value")
        keys = [word.partition("=")[0].strip() for word in against]
        name = ", ".join(f"{key}={value_of(first.config, key)}" for key in keys)
        found = [Column(name, first), Column(", ".join(against), second)]
    together = len(found) == 1 or _fit_together(found, device)
    order = "in turns" if together else "one after the other"
    for group in [found] if together else [[column] for column in found]:
        try:
            _measure(group, taken, total, device, lambda n, what: follow(n, taken * len(found), what))
        except KeyboardInterrupt:
            timed = [column for column in found if len(column.ms) > SETTLING]
            if timed:
                keep(_document(preset, timed, device, order))
            raise
        if trace is not None and group[0] is found[0]:
            assert group[0].trainer is not None
            kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
            write_trace(profiled(group[0].trainer, kinds)[0], trace)
        for column in group:
            column.trainer = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return _document(preset, found, device, order)


def _measure(
    group: Sequence[Column], taken: int, total: int, device: torch.device, follow: Callable[[int, str], None]
) -> None:
    for column in group:
        follow(0, f"building {column.name}")
        before = allocated(device)
        column.trainer, unfit = build(column.resolved, total)
        column.held = allocated(device) - before
        ops = column.trainer.model.ops
        column.operators, column.calls = summary(ops.choices.values()), ops.calls
        if unfit:
            follow(0, unfit)
    for step in range(taken):
        for place, column in enumerate(group):
            timed_step(column, device)
            follow(step * len(group) + place + 1, f"{column.name}: {column.ms[-1]:,.0f} ms")


def timed_step(column: Column, device: torch.device) -> None:
    """One step, timed to its last kernel, with the bytes that this setting alone holds at its peak."""
    assert column.trainer is not None
    before = allocated(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    entry = column.trainer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    column.ms.append(1e3 * (time.perf_counter() - begun))
    column.losses.append(entry["train/lm_loss"])
    column.norms.append(entry["train/grad_norm"])
    others = before - column.held
    column.peak = max(column.peak, peak_memory(device) - others)
    column.held += allocated(device) - before


def allocated(device: torch.device) -> int:
    """Bytes that tensors hold on a GPU, 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _fit_together(columns: Sequence[Column], device: torch.device) -> bool:
    return sum(step_peak(column.resolved.config, device).total for column in columns) <= memory_of(device)


def profiled(trainer: Trainer, kinds: Sequence[ProfilerActivity]) -> tuple[profile, float]:
    """One step under torch's profiler, and its seconds to the last kernel."""
    device = trainer.model.device
    with profile(activities=kinds) as found:
        begun = time.perf_counter()
        trainer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begun
    return found, seconds


def write_trace(found: profile, target: Path) -> None:
    """A Chrome trace of what was profiled, whole or not at all; its ending says whether it is compressed."""
    fresh = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        found.export_chrome_trace(str(fresh))
        os.replace(fresh, target)
    except (OSError, RuntimeError) as error:
        raise InputError(f"{target}: the trace cannot be written ({error}); give --trace another file") from None
    finally:
        fresh.unlink(missing_ok=True)


def _document(preset: str, columns: Sequence[Column], device: torch.device, order: str) -> dict[str, Any]:
    result: dict[str, Any] = {
        "kind": "step",
        "environment": environment(),
        "device": str(device),
        "preset": preset,
        "order": order,
        "units": UNITS | {"ratio": "time per token of the second setting over that of the first"},
        "settings": [figures(column, device) for column in columns],
    }
    if len(columns) == 2:
        first, second = result["settings"]
        result["ratio"] = first["tokens_per_second"] / second["tokens_per_second"]
        if columns[0].batch == columns[1].batch:  # losses of other tokens say nothing about each other
            result["apart"] = apart(columns[0].losses, columns[1].losses)
    return result


def figures(column: Column, device: torch.device, ranks: int = 1) -> dict[str, Any]:
    """What was found of a setting, in the form of the result file; operations are those of one of so many `ranks`."""
    config, ms = column.resolved.config, column.ms[column.settling :]
    rate = 1e3 * column.tokens / statistics.median(ms)
    both = flops_per_token(
        config.model, config.train.sequence_length, frozen_indexer=config.indexer.frozen,
        mtp=config.train.mtp_weight > 0, dense=config.indexer.dense_steps >= len(column.ms),
    )  # fmt: skip
    work = dict(zip(("algorithmic", "reported"), both, strict=True))
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    where = "peak memory" if device.type == "cuda" else "peak memory of the process"
    return {
        "name": column.name,
        "set": column.given(),
        "tokens": column.tokens,
        "operators": column.operators,
        "calls": column.calls.taken,
        "passed_on": column.calls.news(),
        "steps": len(ms),
        "ms": {"median": statistics.median(ms), "lowest": min(ms), "highest": max(ms)},
        "tokens_per_second": rate,
        "tflops": {name: flops * rate / ranks / 1e12 for name, flops in work.items()},
        "share_of_peak": None if gpu is None else {n: flops * rate / ranks / gpu.bf16 for n, flops in work.items()},
        "peak_memory": {"bytes": column.peak, "of": where},
        "losses": column.losses,
        "gradient_norms": column.norms,
    }


def apart(first: Sequence[float | None], second: Sequence[float | None]) -> dict[str, Any]:
    """How far two loss curves lie apart: the most, the mean, and the mean over the last tenth; a step that either
    skipped does not count, and without any step the figures are None."""
    found = [abs(a - b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    last = found[-math.ceil(len(found) / 10) :]
    return {
        "steps": len(found),
        "most": max(found, default=None),
        "mean": statistics.mean(found) if found else None,
        "last": statistics.mean(last) if last else None,
    }
