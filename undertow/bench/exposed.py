"""Communication that nothing hides: how long kernels of collectives run on a GPU while no computing one does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Span = tuple[float, float]
"""Start and end."""

_COLLECTIVE = re.compile(r"nccl|rccl", re.IGNORECASE)
_NAME = re.compile(r"(?:nccl|rccl)(?:Dev)?Kernel_([A-Za-z]+)")


def exposed_communication(events: Iterable[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """What kernels of collectives take of a step of so many `seconds`, from the `traceEvents` of a Chrome trace.

    `seconds` are those in which at least one of them runs, on whichever stream, `exposed_seconds` those of them in
    which no other kernel does, and `exposed_share` is the latter over the step. `by_collective` has the same of each
    kind; kinds that run at the same time both count it. Copies and fills of memory hide nothing.
    """
    kinds: dict[str, list[Span]] = {}
    computing: list[Span] = []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            span = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            name = event["name"]
            if _COLLECTIVE.search(name):
                kinds.setdefault(collective_of(name), []).append(span)
            else:
                computing.append(span)
    busy = union(computing)
    found = {kind: _of(union(spans), busy) for kind, spans in sorted(kinds.items())}
    every = _of(union(span for spans in kinds.values() for span in spans), busy)
    return {
        "step_seconds": seconds,
        "computing_seconds": length(busy),
        **every,
        "exposed_share": every["exposed_seconds"] / seconds,
        "by_collective": found,
    }


def collective_of(kernel: str) -> str:
    """The collective in a kernel's name: `AllGather` of `ncclDevKernel_AllGather_RING_LL(...)`; another name whole."""
    found = _NAME.search(kernel)
    return found.group(1) if found else kernel.partition("(")[0]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments in spans that neither touch nor overlap, in their order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found


def beyond(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Moments of `spans` that are in none of the `others`; both as `union` gives them."""
    found, first = [], 0
    for start, end in spans:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at = first
        while start < end:
            if at == len(others) or others[at][0] >= end:
                found.append((start, end))
                break
            if others[at][0] > start:
                found.append((start, others[at][0]))
            start = others[at][1]
            at += 1
    return found


def length(spans: Iterable[Span]) -> float:
    """The sum of their lengths."""
    return sum((end - start for start, end in spans), 0.0)


def _of(spans: Sequence[Span], busy: Sequence[Span]) -> dict[str, float]:
    return {"seconds": length(spans), "exposed_seconds": length(beyond(spans, busy))}
