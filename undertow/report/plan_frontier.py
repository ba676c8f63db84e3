"""Throughput against the limit of memory, with the tuner's choice and the runners-up in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from undertow.report.axis import Axis, axis
from undertow.report.curve import ticks
from undertow.report.plan_table import grid, note
from undertow.report.quantity import GB, both, gb, words

_WIDTH, _HEIGHT = 1000, 300  # of the drawing, in its own units

Way = Mapping[str, Any]
"""One way to run, from `tuned` of the document."""


class _Mark(NamedTuple):
    """Tokens a second and GPU within so many bytes."""

    name: str
    bytes: int
    rate: float


def frontier(tuned: Mapping[str, Any], memory: int) -> str:
    """Picture and table from `tuned` of the document, empty without a frontier; `memory` are the bytes of a GPU."""
    points: Sequence[Mapping[str, Any]] = tuned["frontier"]
    if not points:
        return ""
    tokens = points[0]["tokens_per_second_per_gpu"] * points[0]["seconds_per_iteration"]
    ways = [("chosen", tuned)] + [(f"runner-up {n}", way) for n, way in enumerate(tuned["runners_up"], start=1)]
    marks = [_Mark(name, way["peak_bytes"], tokens / way["seconds_per_iteration"]) for name, way in ways]
    limits = [_Mark("", point["limit_bytes"], point["tokens_per_second_per_gpu"]) for point in points]
    rows = []
    for point in points:
        schedule, _, *rest = told(point)
        rows.append([gb(point["limit_bytes"]), f"{point['tokens_per_second_per_gpu']:,.0f}", schedule, *rest])
    head = ["limit, GB", "tokens/s/GPU", "schedule", "layout", "computed again"]
    sentence = (
        "Throughput of the fastest way that was found within a limit of memory, searched for at the limits of the "
        "table. The large point is the choice, small ones are the runners-up, each at its peak; the upright line is "
        f"the memory of a GPU, {both(memory)}."
    )
    picture = _picture(limits, marks, memory)
    return f"<h3>Throughput against memory</h3>{note(sentence)}{picture}{grid(head, rows, text=(2, 3, 4))}"


def told(way: Way) -> tuple[str, str, str, str]:
    """Cells of a table: schedule with its widths, peak in GB, layout, and what is computed again."""
    widths = [f"{name} {way[name]}" for name in ("pipeline", "expert")]
    widths += [f"{words(name)} {way[name]}" for name in ("tensor", "context", "micro_batch") if way[name] != 1]
    return f"{way['schedule']}\n{', '.join(widths)}", gb(way["peak_bytes"]), way["layout"], way["recomputed"]


def _picture(limits: Sequence[_Mark], marks: Sequence[_Mark], memory: int) -> str:
    every = sorted((*limits, *marks), key=lambda mark: (mark.bytes, -mark.rate))
    across = axis([memory / GB, *(mark.bytes / GB for mark in every)])
    up = axis((mark.rate for mark in every), widened=True)
    lines = "".join(f"M0,{_HEIGHT * (1 - up.share(tick)):.1f}H{_WIDTH}" for tick in up.ticks)
    steps = [(_WIDTH * across.share(x / GB), _HEIGHT * (1 - up.share(rate))) for x, rate in _rising(every)]
    line = f"M{steps[0][0]:.1f},{steps[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in steps[1:])
    wall = _WIDTH * across.share(memory / GB)
    drawn = (
        f'<path class="grid" d="{lines}"/><path class="line c0" d="{line}H{_WIDTH}"/>'
        f'<path class="dash" style="--k:var(--limit)" d="M{wall:.1f},0V{_HEIGHT}"/>'
    )
    # The choice comes last and so lies on top.
    dots = "".join(_dot(mark, across, up) for mark in reversed(marks))
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="Throughput against memory">{drawn}</svg>'
    )
    axes = f'<div class="y">{ticks(up, "bottom")}</div><div class="x">{ticks(across, "left")}</div>'
    return (
        '<figure class="roof"><figcaption>tokens a second and GPU</figcaption>'
        f'<div class="plot">{svg}{dots}{axes}</div><div class="x-name">limit, GB a GPU</div></figure>'
    )


def _rising(every: Sequence[_Mark]) -> Iterator[tuple[int, float]]:
    """What fits a limit fits a higher one: the steps at which throughput grows."""
    best = 0.0
    for _, size, rate in every:
        if rate > best:
            best = rate
            yield size, rate


def _dot(mark: _Mark, across: Axis, up: Axis) -> str:
    kind = "dot chosen" if mark.name == "chosen" else "dot"
    place = f"left:{100 * across.share(mark.bytes / GB):.2f}%;bottom:{100 * up.share(mark.rate):.2f}%"
    title = escape(f"{mark.name}: {gb(mark.bytes)} GB, {mark.rate:,.0f} tokens a second and GPU")
    return f'<span class="{kind}" style="{place}" title="{title}"></span>'
