"""The tables of switches as text: all positions of our eight families, and of the six published switches.

`python -m tests.config.switch_tables` writes both files anew; a change of them is to be read line by line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

from undertow.config.conflicts import excluded
from undertow.config.optimizations import FAMILIES
from undertow.config.optimizations import resolve as keys_of
from undertow.config.published import RECOMPUTED, SWITCHES, families_of, nearest_rung

FOLDER = Path(__file__).parent / "tables"
FAMILIES_FILE, PUBLISHED_FILE = FOLDER / "families.tsv", FOLDER / "published.tsv"


def family_rows() -> Iterator[str]:
    """Of each of 256 vectors: positions, families that exclude each other, families that are not built, and the nearest
    published rung with what differs from it."""
    yield "\t".join((*FAMILIES, "excluded", "not built", "nearest rung", "differs"))
    for positions in product((0, 1), repeat=len(FAMILIES)):
        on = [name for name, position in zip(FAMILIES, positions, strict=True) if position]
        pairs = [f"{first}+{second}" for first, second in excluded(on)]
        unbuilt = [name for name in on if not FAMILIES[name].built]
        rung, differs, _ = nearest_rung(on)
        told = [f"{name} {position}" for name, position in differs.items()]
        cells = (_join(pairs), _join(unbuilt), str(rung.number), _join(told))
        yield "\t".join((*map(str, positions), *cells))


def published_rows() -> Iterator[str]:
    """Of each of 64 vectors: positions, the families that are on, and what the keys of the families are then."""
    yield "\t".join((*SWITCHES, "families on", "attention", "experts", "layout", "recompute", "nearest rung"))
    for positions in product((0, 1), repeat=len(SWITCHES)):
        families = families_of(dict(zip(SWITCHES, map(bool, positions), strict=True)))
        on = [name for name, position in families.items() if position == "on"]
        keys = keys_of(families)
        layout = "even" if "parallel.layout" in keys else "tuned"
        rung, differs, _ = nearest_rung(on)
        told = f"{rung.number}{''.join(f', {name} {position}' for name, position in differs.items())}"
        again = f"first {RECOMPUTED}" if families["recompute"] == "on" else keys["recompute.layers"]
        cells = (keys["attention.backend"], experts(families), layout, again, told)
        yield "\t".join((*map(str, positions), _join(on), *cells))


def experts(families: Mapping[str, str]) -> str:
    """How tokens get to experts and are multiplied."""
    if families["mega_moe"] == "on":
        return "one kernel"
    sent = "direct" if families["dispatch"] == "on" else "plain"
    return f"{sent} exchange, {'grouped' if families['grouped_gemm'] == 'on' else 'plain'} products"


def _join(names: list[str]) -> str:
    return ", ".join(names) or "-"


def text(rows: Iterator[str]) -> str:
    """A file's content."""
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    FAMILIES_FILE.write_text(text(family_rows()), encoding="utf-8")
    PUBLISHED_FILE.write_text(text(published_rows()), encoding="utf-8")
