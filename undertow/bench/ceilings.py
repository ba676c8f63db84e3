"""What the machine reaches in this very run: the rates that floors are computed from."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from undertow.bench.timing import measure

_LOAD = 1.5  # seconds of matrix products before the one that counts: a GPU under load lowers its clock


@dataclass(frozen=True)
class Ceilings:
    """Measured rates: bytes a second of a copy (those read and those written), operations a second of a sustained
    bfloat16 matrix product (float32 on a CPU)."""

    copy: float
    matmul: float
    copied: int
    side: int

    def json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def ceilings(device: torch.device) -> Ceilings:
    """Measure them: a copy of `copied` bytes, and a square product of `side` rows under load."""
    gpu = device.type == "cuda"
    copied, side = (4 << 30, 8192) if gpu else (16 << 20, 512)
    return Ceilings(_copy(device, copied), _matmul(device, side), copied, side)


def _copy(device: torch.device, size: int) -> float:
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    # Called, not captured: the same copy as a node of a graph moves two thirds as many bytes a second.
    return 2e3 * size / measure(lambda: target.copy_(source), device, captured=False).median


def _matmul(device: torch.device, side: int) -> float:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    begun = time.perf_counter()
    while device.type == "cuda" and time.perf_counter() - begun < _LOAD:
        for _ in range(20):
            torch.mm(left, right)
        torch.cuda.synchronize()
    return 2e3 * side**3 / measure(lambda: torch.mm(left, right), device).median
