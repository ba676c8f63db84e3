"""A timeline in few characters: what a page needs to draw every operation and the bytes that each rank holds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from undertow.planner.pipeline.timeline import Event, Timeline, changes

_DIGITS = 6  # of an iteration, that a tick keeps
_ZERO = ord("0")


def tracks(timeline: Timeline, recomputed: Sequence[float], static: Sequence[int]) -> dict[str, Any]:
    """All operations of an iteration, in ticks of a decimal fraction of a second.

    `recomputed` are the seconds of each stage's backward pass that compute forward passes again, `static` the bytes
    that each rank holds throughout. `stages` has, for each kind of operation, its ticks and the bytes that a rank holds
    more of at its start and at its end. A rank has `stages`, one for each chunk, and for each operation a letter of
    `kinds`, its chunk (`chunks`: the character so many after `0`; empty if there is but one), the ticks of waiting
    before it (`gaps`), how much its microbatch is above the last one of its kind and chunk (`steps`, empty if always 1;
    the first are above -1), and its own ticks (`lasts`, empty if always those of its stage and kind, as in a
    simulation). `step` are the ticks of what it does once, after its last operation.
    """
    seconds = float(timeline.seconds)
    tick = 10.0 ** (math.floor(math.log10(seconds)) - _DIGITS)
    events = [rank.events for rank in timeline.ranks]
    stages = _stages(timeline, events, recomputed, tick)
    chunks = 1 + max(event.operation.chunk for of_rank in events for event in of_rank)
    ranks = []
    for number, rank in enumerate(timeline.ranks):
        ranks.append(
            {
                **_track(rank.events, stages, chunks, tick),
                "step": round(float(rank.step) / tick),
                "bubble": timeline.bubble_fraction(number),
                "peak_bytes": static[number] + rank.peak_bytes,
                "static_bytes": static[number],
            }
        )
    return {"tick": tick, "seconds": seconds, "chunks": chunks, "stages": stages, "ranks": ranks}


def _stages(
    timeline: Timeline, events: Sequence[Sequence[Event]], recomputed: Sequence[float], tick: float
) -> list[dict[str, Any]]:
    """What all operations of a stage and kind have in common."""
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for of_rank in events:
        for (kind, _, _), stage, start, end in of_rank:
            if kind not in found[stage]:
                at_start, at_end = changes(timeline.held[stage], kind, timeline.split)
                found[stage][kind] = [round(float(end - start) / tick), at_start, at_end]
    return [{**found[stage], "recomputed": round(again / tick)} for stage, again in enumerate(recomputed)]


def _track(events: Sequence[Event], stages: Sequence[dict[str, Any]], chunks: int, tick: float) -> dict[str, Any]:
    last: dict[tuple[str, int], int] = defaultdict(lambda: -1)
    gaps, steps, now = [], [], 0
    lasts = [max(1, round(float(event.end - event.start) / tick)) for event in events]
    usual = [stages[event.stage][event.operation.kind][0] for event in events]
    if all(abs(a - b) <= 1 for a, b in zip(lasts, usual, strict=True)):
        lasts = []
    for ((kind, microbatch, chunk), _, start, _), length in zip(events, lasts or usual, strict=True):
        # From what was drawn so far, not from the last end: rounding does not add up.
        gaps.append(max(0, round(float(start) / tick) - now))
        now += gaps[-1] + length
        steps.append(microbatch - last[kind, chunk])
        last[kind, chunk] = microbatch
    of_chunk = {event.operation.chunk: event.stage for event in events}
    return {
        "stages": [of_chunk[chunk] for chunk in sorted(of_chunk)],
        "kinds": "".join(event.operation.kind for event in events),
        "chunks": "".join(chr(_ZERO + event.operation.chunk) for event in events) if chunks > 1 else "",
        "gaps": gaps,
        "steps": [] if all(step == 1 for step in steps) else steps,
        "lasts": lasts,
    }
