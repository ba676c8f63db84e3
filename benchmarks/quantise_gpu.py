"""Quantising and reading kernels on one GPU: bytes a second against a plain copy in the same run, and bits checked.

    python -m benchmarks.quantise_gpu --json benchmarks/results/quantise_gpu.json

Each kernel's bytes are those it must read and write once. Kernels and copy take turns; figures are medians of the
rounds with the lowest and highest. Before it is timed, each result is compared with plain torch on a slice.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import environment
from undertow.quant.blocks import Block
from undertow.quant.formats import E2M1, E4M3, E4M3_FNUZ
from undertow.quant.kernels import converts
from undertow.quant.quantise import quantise
from undertow.quant.quantised import Quantised
from undertow.quant.records import read_records, write_records
from undertow.quant.scheme import Scheme

ROWS, COLUMNS = 65536, 7168
ENTRIES, WIDTH, ROTATED = 900_000, 512, 64
CASES: dict[str, Scheme] = {
    "weights, fp8 128x128": Scheme(E4M3, Block(128, 128)),
    "weights, fp8 32x32": Scheme(E4M3, Block(32, 32)),
    "weights, fp8 fnuz 128x128, float32 scales": Scheme(E4M3_FNUZ, Block(128, 128), "float32"),
    "weights, mxfp4": Scheme(E2M1, Block(1, 32)),
    "activations, fp8 1x128": Scheme(E4M3, Block(1, 128)),
    "activations, fp8 1x128, float32 scales": Scheme(E4M3, Block(1, 128), "float32"),
    "activations, fp8 1x64": Scheme(E4M3, Block(1, 64)),
}


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Of one call, by events around `repeats` of them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def check(name: str, scheme: Scheme, values: Tensor, made: Quantised) -> None:
    """Raise unless codes, scales and numbers of the first rows are those of plain torch."""
    rows = 256
    expected = quantise(values[:rows].cpu(), scheme)
    found = Quantised(made.payload[:rows].cpu(), made.scales[: expected.scales.shape[0]].cpu(), scheme.block)
    same = torch.equal(found.payload.view(torch.uint8), expected.payload.view(torch.uint8))
    numbers = made.dequantise(torch.bfloat16)[:rows].cpu()
    if not same or not torch.equal(numbers, expected.dequantise(torch.bfloat16)):
        raise AssertionError(f"{name}: the kernel's bits are not those of plain torch")


def works(values: Tensor) -> dict[str, tuple[Callable[[], Any], int]]:
    """By name, what is timed and the bytes that it reads and writes."""
    found: dict[str, tuple[Callable[[], Any], int]] = {}
    for name, scheme in CASES.items():
        made = quantise(values, scheme)
        check(name, scheme, values, made)
        moved = values.nbytes + made.nbytes
        found[f"quantise {name}"] = (lambda scheme=scheme: quantise(values, scheme), moved)
        found[f"dequantise {name}"] = (lambda made=made: made.dequantise(torch.bfloat16), moved)
    entries = values.view(-1)[: ENTRIES * WIDTH].view(ENTRIES, WIDTH)
    records = write_records(entries, ROTATED)
    if not torch.equal(records[:999].cpu(), write_records(entries[:999].cpu(), ROTATED)):
        raise AssertionError("records: the kernel's bytes are not those of plain torch")
    moved = entries.nbytes + records.nbytes
    found["write cache records"] = (lambda: write_records(entries, ROTATED), moved)
    found["read cache records"] = (lambda: read_records(records, WIDTH, ROTATED), moved)
    return found


def measure(rounds: int, repeats: int) -> dict[str, Any]:
    """Seconds and bytes a second of everything, in turns with a copy."""
    torch.manual_seed(0)
    values = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(values)
    timed = {"copy": (lambda: target.copy_(values), 2 * values.nbytes), **works(values)}
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, (work, _) in timed.items():
            work()
            taken[name].append(seconds(work, repeats))
    rates = {name: timed[name][1] / statistics.median(times) for name, times in taken.items()}
    return {
        name: {
            "milliseconds": spread([1e3 * value for value in taken[name]]),
            "bytes": timed[name][1],
            "gigabytes_per_second": rates[name] / 1e9,
            "share_of_copy": rates[name] / rates["copy"],
        }
        for name in timed
    }


def main() -> None:
    """Print a table, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    found = measure(options.rounds, options.repeats)
    for name, row in found.items():
        print(f"{name:48} {row['milliseconds']['median']:8.3f} ms {row['gigabytes_per_second']:7.0f} GB/s "
              f"{row['share_of_copy']:6.1%}")  # fmt: skip
    result = {
        **environment(),
        "values": [ROWS, COLUMNS],
        "entries": [ENTRIES, WIDTH],
        "instructions": converts(torch.device("cuda")),
        "kernels": found,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
