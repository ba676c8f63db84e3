"""What a training run tells of itself: curves and figures from the lines of its `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from undertow.report.curve import Point, curve
from undertow.report.page import Row, page, table

Metrics = Sequence[Mapping[str, Any]]

_SAMPLE = (
    "Held-out loss of a run is over the first train.eval_sequences sequences of the held-out text, always the same."
)
_GIB = 2**30


class Figure(NamedTuple):
    """A sentence, the unit of the values, and metrics by their names in the legend: of every step, and now and then."""

    told: str
    unit: str
    lines: Mapping[str, str]
    dots: Mapping[str, str] = {}


_LOSS = "Loss"
_FIGURES = {
    _LOSS: Figure(
        f"Next-token cross-entropy of each step's batch and of held-out text. {_SAMPLE}",
        "nats per token",
        {"batch": "train/lm_loss"},
        {"held out": "eval/loss"},
    ),
    "Learning rate": Figure("As the schedule gives it.", "learning rate", {"learning rate": "train/lr"}),
    "Gradient norm": Figure(
        "Global norm of the gradient before it is clipped.",
        "norm",
        {"gradient": "train/grad_norm", "indexer's gradient": "train/indexer_grad_norm"},
    ),
    "Loss of the token after next": Figure(
        "Cross-entropy of multi-token prediction (MTP) in each step's batch.",
        "nats per token",
        {"token after next": "train/mtp_loss"},
    ),
    "Balance loss": Figure(
        "How unevenly a sequence uses the experts, mean over sequences and layers with learned routing: 1 is even.",
        "balance loss",
        {"balance": "train/balance_loss"},
    ),
    "Load of the experts": Figure(
        "Tokens of the most and the least used expert in layers with learned routing, as multiples of an even share.",
        "times an even share",
        {"most": "moe/load_max", "least": "moe/load_min"},
    ),
    "Indexer loss": Figure(
        "How far the indexer's scores are from what attention weighs (KL divergence), summed over its layers.",
        "nats per token",
        {"indexer": "train/indexer_loss"},
    ),
    "What the indexer finds": Figure(
        "Share of the entries that attention weighs most, among all visible ones, that the indexer chose.",
        "recall",
        {},
        {"recall": "eval/indexer_recall"},
    ),
    "Throughput": Figure("Tokens learned from in each step.", "tokens per second", {"rate": "train/tokens_per_second"}),
}
_CONVENTIONS = {
    "algorithmic": "Counts the arithmetic that the architecture asks for.",
    "reported": "Counts as the published pretraining run does, as if sub-layers ran on every residual stream.",
}
_LAST = {
    "held-out loss, nats per token": ("eval/loss", "Over a sample of it, see Loss."),
    "held-out loss, nats per byte": ("eval/nats_per_byte", "The same loss in a unit that no tokenizer changes."),
    "indexer recall": ("eval/indexer_recall", ""),
    "token after next (MTP), nats per token": ("train/mtp_loss", ""),
    "balance loss": ("train/balance_loss", "1 is even."),
    "indexer loss, nats per token": ("train/indexer_loss", ""),
}


def run_sections(metrics: Metrics, origin: Sequence[Row] = ()) -> dict[str, str]:
    """HTML by heading for a run of at least one step, its `origin` last; empty where it tells nothing."""
    return {
        **{heading: _drawn(figure, metrics) for heading, figure in _FIGURES.items()},
        _LOSS: _drawn(_FIGURES[_LOSS], metrics) or "<p>No step had a finite loss.</p>",
        "Training": table(_figures(metrics)),
        "Run": table(origin) if origin else "",
    }


def run_page(name: str, metrics: Metrics, origin: Sequence[Row] = ()) -> str:
    """The page of a run, finished or not; `origin` is what is known of it beside its metrics."""
    sections = run_sections(metrics, origin)
    tables = {heading: sections.pop(heading) for heading in ("Run", "Training")}
    loss = {_LOSS: sections.pop(_LOSS)}
    taken = metrics[-1]["step"]
    lead = f"{taken:,} step{'' if taken == 1 else 's'}, {_tokens(metrics)} tokens."
    return page(f"Run {name}", loss | tables | sections, lead)


def _drawn(figure: Figure, metrics: Metrics) -> str:
    # A step that lacks a key breaks the line; what is measured now and then stands only where it was measured.
    lines = {name: [(entry["step"], entry.get(key)) for entry in metrics] for name, key in figure.lines.items()}
    dots = {name: [(e["step"], e[key]) for e in metrics if key in e] for name, key in figure.dots.items()}
    if not any(_known(points) for points in (*lines.values(), *dots.values())):
        return ""
    return f"<p>{figure.told}</p>{curve(lines, 'step', figure.unit, dots)}"


def _known(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _values(metrics: Metrics, key: str) -> list[tuple[float, float]]:
    return _known([(entry["step"], entry.get(key)) for entry in metrics])


def _tokens(metrics: Metrics) -> str:
    known = _values(metrics, "tokens")
    return f"{known[-1][1]:,}" if known else "an unknown number of"


def _figures(metrics: Metrics) -> list[Row]:
    skipped = _values(metrics, "train/skipped")
    rows = [
        Row("steps", f"{metrics[-1]['step']:,}"),
        Row("steps skipped", f"{skipped[-1][1] if skipped else 0:,}", "Their loss or gradient was not finite."),
        Row("tokens", _tokens(metrics)),
    ]
    for name, (key, note) in _LAST.items():
        if known := _values(metrics, key):
            rows.append(Row(f"{name}, at step {known[-1][0]:,}", f"{known[-1][1]:.4f}", note))
    if rate := _median(metrics, "train/tokens_per_second"):
        rows.append(Row("tokens per second, median of the steps", f"{rate:,.0f}"))
    for convention, note in _CONVENTIONS.items():
        if work := _median(metrics, f"train/tflops_{convention}"):
            rows.append(Row(f"TFLOP/s, {convention} convention, median", f"{work:.4g}", note))
        if share := _median(metrics, f"train/mfu_{convention}"):
            rows.append(Row(f"share of the GPU's peak, {convention} convention, median", f"{share:.2%}"))
    if memory := _values(metrics, "memory/peak_bytes"):
        most = max(size for _, size in memory)
        rows.append(Row("peak memory", f"{most / _GIB:.2f} GiB", "Of the whole process on a CPU, of tensors on a GPU."))
    return rows


def _median(metrics: Metrics, key: str) -> float | None:
    known = [value for _, value in _values(metrics, key)]
    return median(known) if known else None
