"""Replicas of a serving engine as text for a terminal and as plain values, and what of them no measurement covers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from undertow.planner.memory.model import GB
from undertow.planner.serving.replicas import Replicas
from undertow.planner.table import columns, short

_MIB = 2**20


def replicas_text(replicas: Replicas) -> list[str]:
    """Widths, where the memory of a GPU goes, and a table of sequence lengths."""
    serving, geometry = replicas.serving, replicas.geometry
    cache, idle = serving.cache, f", {replicas.idle} GPUs idle" if replicas.idle else ""
    parts = [f"weights in {serving.form.upper()} {_gb(serving.weights)}"]
    if serving.update_buckets:
        parts.append(f"buffers for new weights {_gb(serving.update_buckets)}")
    parts.append(f"room for caches {_gb(max(0, serving.room))}")
    lines = [
        f"  {replicas.replicas:,} x {geometry.gpus} GPUs a replica: tensor {geometry.tensor}, "
        f"expert {geometry.expert}, data {geometry.data}{idle}",
        f"  of {_gb(serving.budget)} GB to use on a GPU: {', '.join(parts)} GB",
        f"  cache in {cache.form}: {cache.per_token:,.0f} bytes a token and {short(cache.fixed / _MIB)} MiB a "
        f"sequence; longest context that fits {serving.tokens:,}",
    ]
    rows = [
        ["tokens", "MiB a sequence", "sequences in all", "GFLOP a token", "ms a step at least", "with all sequences"]
    ]
    for at in replicas.lengths:
        full = "-" if at.least_seconds_full is None else short(1e3 * at.least_seconds_full)
        sizes = (short(at.sequence_bytes / _MIB), f"{at.sequences:,}", short(at.flops_per_token / 1e9))
        rows.append([f"{at.length:,}", *sizes, short(1e3 * at.least_seconds), full])
    return [*lines, *columns(rows, right=range(len(rows[0])))]


def replicas_document(replicas: Replicas) -> dict[str, Any]:
    """The same in bytes, seconds and operations."""
    serving, geometry = replicas.serving, replicas.geometry
    return {
        "gpus": replicas.pool.count,
        "gpu": replicas.pool.gpu.name,
        "gpus_per_replica": geometry.gpus,
        "tensor": geometry.tensor,
        "expert": geometry.expert,
        "data": geometry.data,
        "replicas": replicas.replicas,
        "idle_gpus": replicas.idle,
        "sequence_length": serving.length,
        "sequences": replicas.sequences,
        "fits": replicas.fits,
        "budget_bytes": serving.budget,
        "weights_format": serving.form,
        "weights_bytes": serving.weights,
        "update_bucket_bytes": serving.update_buckets,
        "cache_format": serving.cache.form,
        "cache_room_bytes": max(0, serving.room),
        "cache_bytes_per_token": serving.cache.per_token,
        "cache_bytes_per_sequence": serving.cache.fixed,
        "sequence_bytes": serving.sequence_bytes,
        "longest_context": serving.tokens,
        "lengths": [asdict(at) for at in replicas.lengths],
    }


def unmeasured(replicas: Replicas) -> Iterator[str]:
    """In sentences, what of the replicas no measurement covers."""
    yield "activations, runtime and libraries are left out"
    yield (
        "seconds of a step are the longer of reading weights and cache from memory and the operations at the peak, a "
        "lower bound; experts are counted as if tokens chose them by chance"
    )
    gpu, form = replicas.pool.gpu, replicas.serving.form
    if form == "fp4" and not gpu.fp4:
        yield f"{gpu.name} has no FP4 units; what it takes to widen the weights is left out"


def _gb(size: int) -> str:
    return f"{size / GB:,.1f}"
