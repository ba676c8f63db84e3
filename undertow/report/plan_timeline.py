"""The timeline of a plan and the memory over time: their data, their scripts, and what they show without scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from undertow.report.plan_table import grid, legend, note
from undertow.report.plan_tracks import still_bytes, still_operations
from undertow.report.quantity import both, ceiling, significant

_SCRIPTS = ("plan_view.js", "plan_timeline.js", "plan_memory.js", "plan_hands.js", "plan_start.js")
_KINDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
_KEYS = (
    "Wheel (after a click), pinch or + and - zoom; drag or arrows left and right move; 0 shows the whole iteration. "
    "Point at an operation for its times, or step through them with , and . and from rank to rank with arrows up and "
    "down; Escape leaves."
)
_STILL = "<noscript><p>Scripts are off: where a rank has many operations, dark is when it is busy.</p></noscript>"
_TOOLS = {"-": "Zoom out", "+": "Zoom in", "ArrowLeft": "Earlier", "ArrowRight": "Later", "0": "Whole iteration"}
_SIGNS = {"-": "\u2212", "+": "+", "ArrowLeft": "\u25c0", "ArrowRight": "\u25b6", "0": "Whole iteration"}


def timeline_section(tracks: Mapping[str, Any]) -> str:
    """Operations of every rank from `tracks` of the document, and a table of what each rank waits."""
    split = any("W" in stage for stage in tracks["stages"])
    again = any(stage["recomputed"] for stage in tracks["stages"])
    told = (
        f"One iteration of {significant(tracks['seconds'])} s, one row a pipeline rank, the first above. Numbers are "
        "microbatches, grey is waiting. Where operations are too narrow to be told apart, a column shows how its time "
        "is shared out."
    )
    if tracks["chunks"] > 1:
        told += " Later chunks of a rank are paler."
    if again:
        told += " The hatched share of a backward pass computes forward passes again, layer by layer."
    kinds = [kind for kind in _KINDS if kind != "W" or split]
    key = [(f'class="k" style="--k:var(--{kind})"', f"{_KINDS[kind]} ({kind})") for kind in kinds]
    if again:
        key.append(('class="k e" style="--k:var(--B)"', "forward computed again"))
    if any(rank["step"] for rank in tracks["ranks"]):
        key.append(('class="k" style="--k:var(--S)"', "once an iteration: sums of gradients, gathers of weights"))
    key.append(('class="k" style="--k:var(--idle)"', "waiting"))
    canvas = _STILL + _canvas("timeline", "Timeline of the iteration", still_operations(tracks))
    live = '<p class="unseen" id="chosen" aria-live="polite"></p>'
    return note(told) + legend(key) + _tools() + canvas + live + _ranks(tracks)


def held_section(tracks: Mapping[str, Any], limit: int) -> str:
    """Bytes of every rank over the same time, under what it holds throughout."""
    told = (
        "What a GPU of each pipeline rank holds, over the part of the iteration that the timeline shows; the lowest "
        f"part is there throughout; the limit is {both(limit)}. Where steps are too narrow, the pale part "
        "reaches to the most."
    )
    key = [
        ('class="k" style="--k:var(--F)"', "of microbatches"),
        ('class="k" style="--k:var(--still)"', "throughout"),
        ('class="limit"', "memory of a GPU"),
    ]
    return note(told) + legend(key) + _tools() + _canvas("held", "Memory over time", still_bytes(tracks, limit))


def script(tracks: Mapping[str, Any], limit: int) -> str:
    """The data of both charts and what makes them, as elements; nothing in a name can end them early."""
    top = round(ceiling(limit, (rank["peak_bytes"] for rank in tracks["ranks"])))
    data = embedded({**tracks, "limit_bytes": limit, "top_bytes": top})
    folder = Path(__file__).parent
    code = "\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return (
        '<div id="tip" hidden></div>'
        f'<script type="application/json" id="tracks">{data}</script>\n'
        f'<script>(() => {{ "use strict";\n{code}}})();</script>'
    )


def embedded(value: Any) -> str:
    """JSON for a script element: characters that HTML or JavaScript read otherwise are escaped."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _canvas(name: str, label: str, still: str) -> str:
    return (
        f'<div class="chart"><canvas id="{name}" tabindex="0" role="application" aria-label="{label}" '
        f'aria-describedby="keys"></canvas>{still}</div>'
    )


def _tools() -> str:
    buttons = "".join(
        f'<button type="button" data-move="{key}" aria-label="{name}" title="{name}">{_SIGNS[key]}</button>'
        for key, name in _TOOLS.items()
    )
    return f'<div class="tools" hidden>{buttons}</div>'


def _ranks(tracks: Mapping[str, Any]) -> str:
    rows = []
    for number, rank in enumerate(tracks["ranks"]):
        stages = ", ".join(str(stage) for stage in rank["stages"])
        busy = tracks["seconds"] * (1 - rank["bubble"])
        rows.append([str(number), stages, significant(busy), f"{rank['bubble']:.1%}", both(rank["peak_bytes"])])
    table = grid(["rank", "stages", "busy, s", "waiting", "most memory"], rows)
    return f'<p class="hint" id="keys">{_KEYS}</p>{table}'
