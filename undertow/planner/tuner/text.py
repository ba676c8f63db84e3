"""What the tuner compared and found, as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from undertow.planner.memory.model import GB
from undertow.planner.table import columns

if TYPE_CHECKING:
    from undertow.planner.tuner.tuned import Tuned, Way

_NOTICED = 5e-5


def tuned_text(tuned: Tuned) -> list[str]:
    """The ways compared, what holds the best one back, what more memory or faster kernels would buy, and YAML."""
    rows = [["", "seconds", "GB", "tp/pp/ep/cp", "micro-batch", "schedule", "layout", "recomputed"]]
    rows += [_row("as planned before", tuned.start, tuned.limit_bytes), _row("best", tuned.best, tuned.limit_bytes)]
    rows += [_row(f"runner-up {n}", way, tuned.limit_bytes) for n, way in enumerate(tuned.runners_up, 1)]
    proof = "; of this geometry and schedule, no layout is faster" if tuned.proven else ""
    return [
        f"tuned within {tuned.limit_bytes / GB:,.1f} GB a GPU, a margin of {tuned.margin:.3g}",
        *columns(rows, right=(1, 2, 4)),
        f"  {tuned.compared:,} of {tuned.cases:,} combinations of widths and schedules were searched{proof}",
        *([f"  {tuned.kept}"] if tuned.kept else []),
        f"  held back by {tuned.binding}",
        *_prices(tuned),
        *(f"  {line}" for line in ("", "for a recipe (--fragment FILE writes it):", *tuned.fragment.splitlines())),
    ]


def _row(name: str, way: Way, limit: int) -> list[str]:
    g = way.geometry
    return [
        name,
        f"{way.seconds_per_iteration:.4g}",
        f"{way.peak_bytes / GB:,.1f}{', too much' * (way.peak_bytes > limit)}",
        f"{g.tensor}/{g.pipeline}/{g.expert}/{g.context}",
        str(way.batch.micro_batch),
        way.schedule,
        way.layout,
        str(way.recompute),
    ]


def _prices(tuned: Tuned) -> list[str]:
    dear = [price for price in tuned.prices if price.gb]
    gains = [gain for gain in tuned.gains if gain.seconds >= _NOTICED * tuned.seconds_per_iteration]
    lines = [
        f"  {price.gb} GB more on rank {price.rank} alone: {price.seconds:.4f} s less an iteration, "
        f"{1e3 * price.seconds_per_gb:.2f} ms a GB"
        for price in dear
    ]
    lines += [f"  {p.gb} GB more on every GPU: {p.seconds:.4f} s less an iteration" for p in tuned.room if p.seconds]
    if gains:
        told = ", ".join(f"{gain.work} {gain.seconds:.3f} s" for gain in gains)
        lines.append(f"  10 % faster work, in this layout, saves an iteration: {told}")
    return lines
