"""Where in Undertow a process is, read off its stacks from another thread: the work itself notes nothing."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_PACKAGE = "undertow"

# Modules and functions, or their beginnings, and what a step does in them. The first that fits counts.
PHASES = {
    "undertow.parallel.dispatch": "exchange of experts",
    "undertow.parallel.shard.sum_gradients": "sum of gradients",
    "undertow.parallel.norm": "clipping",
    "undertow.parallel.pipeline": "pipeline",
    "undertow.optim.clipping": "clipping",
    "undertow.optim": "update",
    "undertow.checkpoint": "checkpoint",
    "undertow.train.evaluation": "evaluation",
    "undertow.train.objective": "forward",
    "undertow.data": "data",
}
_BACKWARD = "torch.autograd"
EXCHANGES = ("torch.distributed", "undertow.parallel")
"""Modules that talk with other ranks: what stands still with its innermost frame there waits for them."""


def whereabouts(thread: int, beside: frozenset[int] = frozenset()) -> tuple[str, bool]:
    """Phases of what `thread` does, outermost first, and the innermost place in Undertow, as `backward, exchange of
    experts in _both (undertow/parallel/dispatch.py:54)`; and whether it stands in an exchange with other ranks.

    In a backward pass other threads count too, for a GPU's operators run there; `beside` are those to leave out.
    """
    frames = sys._current_frames()
    if thread not in frames:
        return "at its end", False
    stack = list(_outermost_first(frames[thread]))
    if any(_module(frame) == _BACKWARD for frame in stack):
        others = (frame for number, frame in frames.items() if number not in {thread, *beside})
        helping = [list(_outermost_first(frame)) for frame in others]
        stack += next((found for found in helping if _phases(found)), [])
    ours = [frame for frame in stack if _module(frame).partition(".")[0] == _PACKAGE]
    told = ", ".join(_phases(stack))
    if ours:
        inner = ours[-1]
        path = os.path.join(*_module(inner).split(".")[:-1], os.path.basename(inner.f_code.co_filename))
        told = f"{told}{' in ' * bool(told)}{inner.f_code.co_name} ({path}:{inner.f_lineno})"
    waits = _module(stack[-1]).startswith(EXCHANGES)
    return told or "outside Undertow", waits


def main_thread() -> int:
    """The thread that trains."""
    return threading.main_thread().ident or 0


def _outermost_first(frame: FrameType | None) -> Iterator[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return reversed(found)


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _phases(stack: list[FrameType]) -> list[str]:
    """Of every frame that has one, none twice in a row."""
    found: list[str] = []
    for frame in stack:
        phase = _phase(_module(frame), frame.f_code.co_name)
        if phase and phase not in found[-1:]:
            found.append(phase)
    return found


def _phase(module: str, function: str) -> str | None:
    if module == _BACKWARD:
        return "backward"
    if not module.startswith(_PACKAGE):
        return None
    return next((phase for start, phase in PHASES.items() if f"{module}.{function}".startswith(start)), None)
