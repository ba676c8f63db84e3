"""Seconds of a piece of work on a CPU or a GPU, measured so that its data does not lie in the cache already.

On a GPU a CUDA graph of the work is replayed between two events, after a write that is larger than the last-level
cache; the write itself is not timed. What waits for the GPU within itself cannot be captured and is timed call by call,
launches included. Of what is so small that a replay is mostly its launch, one graph holds many calls.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

FEWEST, MOST = 5, 200
SECONDS = 0.1
"""Time that one measurement aims for, warm-up apart, as in the harness that timed the peers; between `FEWEST` and
`MOST` repeats. A GPU at its power limit is a few per cent slower after longer."""
_FLUSH = 512 << 20


@dataclass(frozen=True)
class Times:
    """Milliseconds of one piece of work: median, lowest and highest of `repeats`, and how they were taken: `graph`,
    `graph of N calls`, `events` or `clock`."""

    median: float
    lowest: float
    highest: float
    repeats: int
    how: str

    def json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def measure(
    work: Callable[[], Any], device: torch.device, seconds: float | None = None, *, captured: bool = True,
    calls: int = 1,
) -> Times:  # fmt: skip
    """Times of `work`, which is called once before to warm up; without `captured` call by call. A graph holds `calls`
    of it, and times are those of one: all but the first find the cache as the one before left it.

    On a GPU call it on the stream on which the inputs, and whatever the work saved before, were made.
    """
    seconds = SECONDS if seconds is None else seconds
    if device.type == "cpu":
        return _by_clock(work, seconds)
    work()
    torch.cuda.synchronize()
    if not captured or _waits(work):
        return _by_events(work, "events", seconds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            work()
    return _by_events(graph.replay, "graph" if calls == 1 else f"graph of {calls} calls", seconds, calls)


def _by_clock(work: Callable[[], Any], seconds: float) -> Times:
    taken: list[float] = []
    work()
    begun = time.perf_counter()
    while len(taken) < FEWEST or (len(taken) < MOST and time.perf_counter() - begun < seconds):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return _times([1e3 * value for value in taken], "clock")


def _by_events(work: Callable[[], Any], how: str, seconds: float, calls: int = 1) -> Times:
    blank = torch.empty(_FLUSH, dtype=torch.uint8, device="cuda")
    once = _events(work, blank, 2)[-1]
    repeats = min(max(int(1e3 * seconds / max(once, 1e-3)), FEWEST), MOST)
    return _times([taken / calls for taken in _events(work, blank, repeats)], how)


def _events(work: Callable[[], Any], blank: torch.Tensor, repeats: int) -> list[float]:
    pairs = []
    for _ in range(repeats):
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        blank.zero_()
        pair[0].record()
        work()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _waits(work: Callable[[], Any]) -> bool:
    """Whether the work waits for the GPU, which a graph must not."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # It misses some kinds of waiting, as torch warns; capturing those fails, and is reported.
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return False


def _times(taken: list[float], how: str) -> Times:
    return Times(statistics.median(taken), min(taken), max(taken), len(taken), how)
