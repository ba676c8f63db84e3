"""Memory of a plan's stages: a stacked bar each against the limit, and every number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from undertow.report.plan_table import grid, legend, note
from undertow.report.quantity import GB, both, ceiling, digits, gb, gib

_COLOURS = 10  # of plan.css


def memory_section(memory: Mapping[str, Any]) -> str:
    """Bars and table from `memory` of the document."""
    stages: Sequence[Mapping[str, Any]] = memory["stages"]
    limit = memory["limit_bytes"]
    place = "pipeline rank" if memory["chunks"] > 1 else "stage"
    names = dict.fromkeys(term["name"] for stage in stages for term in stage["terms"])
    colours = {name: number % _COLOURS for number, name in enumerate(names)}
    most = ceiling(limit, (stage["total_bytes"] for stage in stages))
    bars = "".join(_bar(f"{_short(place)} {stage['stage']}", stage, colours, limit, most) for stage in stages)
    bases = {term["name"]: term["basis"] for stage in stages for term in stage["terms"]}
    alike = f", of which there are {memory['gpus_per_stage']:,} alike" if memory["gpus_per_stage"] > 1 else ""
    far = "" if limit <= most else ", far to the right of the bars"
    told = (
        f"Peak of one GPU of each {place}{alike}. The limit is {both(limit)}{far}. Hatched parts are estimated; the "
        "others agree with modules or measurements to the byte."
    )
    key = legend([(_look(colours[name], bases[name]), name) for name in names] + [('class="limit"', "memory of a GPU")])
    return note(told) + key + bars + _table(stages, bases, place) + _host(stages)


def _host(stages: Sequence[Mapping[str, Any]]) -> str:
    most = max(stage["host_bytes"] for stage in stages)
    return note(f"Besides, the host's memory holds up to {both(most)} for each GPU.") if most else ""


def _short(place: str) -> str:
    return place.removeprefix("pipeline ")


def _look(colour: int, basis: str) -> str:
    return f'class="k{" e" if basis == "estimated" else ""}" style="--k:var(--k{colour})"'


def _bar(name: str, stage: Mapping[str, Any], colours: Mapping[str, int], limit: int, most: float) -> str:
    parts, left = [], 0
    for term in stage["terms"]:
        title = f"{term['name']}: {both(term['bytes'])}, {term['basis']}"
        look = _look(colours[term["name"]], term["basis"])[:-1]
        at, width = 100 * left / most, 100 * term["bytes"] / most
        parts.append(f'<span {look};left:{at:.3f}%;width:{width:.3f}%" title="{escape(title)}"></span>')
        left += term["bytes"]
    total = stage["total_bytes"]
    over = total - limit
    free = f"{both(-over)} free" if over <= 0 else f'<b class="no">{both(over)} too much</b>'
    line = f'<i class="limit" style="left:{100 * limit / most:.3f}%"></i>' if limit <= most else ""
    picture = f'<div class="track" role="img" aria-label="{escape(name)}: {both(total)}">{"".join(parts)}{line}</div>'
    return f'<div class="bar"><b>{escape(name)}</b>{picture}<em>{both(total)}, {free}</em></div>'


def _table(stages: Sequence[Mapping[str, Any]], bases: Mapping[str, str], place: str) -> str:
    most = digits(max(stage["total_bytes"] for stage in stages))

    def size(value: int) -> str:
        decimals = most if value >= GB // 20 else 3
        return f"{gb(value, decimals)}\n{gib(value, decimals)} GiB"

    sizes = [{term["name"]: term["bytes"] for term in stage["terms"]} for stage in stages]
    rows = [
        [f"{name}\n{basis}", *(size(of[name]) if name in of else "" for of in sizes)] for name, basis in bases.items()
    ]
    total = ["all terms", *(size(stage["total_bytes"]) for stage in stages)]
    head = ["GB", *(f"{_short(place)} {stage['stage']}" for stage in stages)]
    return grid(head, rows, total)
