"""What the tuner found: its choice beside others, throughput against memory, what holds it back, and the YAML of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from undertow.report.page import Row, table
from undertow.report.plan_frontier import frontier, told
from undertow.report.plan_table import grid, note
from undertow.report.quantity import both, significant

_OVER = "\nabove the limit"


def tuned_section(tuned: Mapping[str, Any], memory: int) -> str:
    """Comparison, frontier, prices and fragment from `tuned` of the document; `memory` are the bytes of a GPU."""
    sentence = (
        f"The fastest way within {both(tuned['limit_bytes'])} a GPU, {tuned['margin']:.0%} below the limit that was "
        f"given; {tuned['compared']:,} of {tuned['cases']:,} combinations of widths and schedules were searched."
    )
    if tuned["proven"]:
        sentence += " No other layout of these widths and this schedule is faster within the limit."
    return "".join(
        (
            note(sentence),
            _ways(tuned),
            f"<h3>What holds it back</h3>{note(_sentence(tuned['binding']))}",
            _prices(tuned["prices"]),
            _gains(tuned["gains"]),
            frontier(tuned, memory),
            _fragment(tuned["fragment"]),
        )
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _ways(tuned: Mapping[str, Any]) -> str:
    best = tuned["seconds_per_iteration"]
    ways = [("chosen", tuned), *((f"runner-up {n}", way) for n, way in enumerate(tuned["runners_up"], start=1))]
    over = tuned["start"]["peak_bytes"] > tuned["limit_bytes"]
    ways.append((f"without tuning{_OVER if over else ''}", tuned["start"]))
    rows = [
        [name, significant(way["seconds_per_iteration"]), _more(way["seconds_per_iteration"], best), *told(way)]
        for name, way in ways
    ]
    return grid(
        ["way", "s an iteration", "slower", "schedule", "peak GB", "layout", "computed again"], rows, text=(3, 5, 6)
    )


def _more(seconds: float, best: float) -> str:
    return f"{seconds / best - 1:.1%}" if seconds > best else ""


def _prices(prices: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            f"rank {price['rank']}",
            str(price["gb"]),
            significant(price["seconds"]),
            significant(price["seconds_per_gb"], 3),
        ]
        for price in prices
        if price["gb"]
    ]
    if not rows:
        return note("More memory on one pipeline rank alone would not make an iteration shorter.")
    first = "The first step of memory, on that pipeline rank alone, that makes an iteration shorter:"
    return note(first) + grid(["pipeline rank", "GB more", "s shorter", "s for each GB"], rows)


def _gains(gains: Sequence[Mapping[str, Any]]) -> str:
    rows = [Row(f"{gain['work']} 10 % faster", f"{gain['seconds']:.4f} s shorter") for gain in gains]
    return f'{note("What faster kernels would buy, the layout as it is:")}<div class="narrow">{table(rows)}</div>'


def _fragment(text: str) -> str:
    said = "These sections of a recipe say it; <code>undertow plan</code> and <code>undertow train</code> read them."
    button = '<div class="tools" hidden><button type="button" data-copy="fragment">Copy</button></div>'
    return f'<h3>As a recipe</h3><p>{said}</p>{button}<pre id="fragment">{escape(text)}</pre>'
