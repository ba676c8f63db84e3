"""What a training run tells of itself: curves and figures from the lines of its `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from undertow.report.curve import Point, curve
from undertow.report.page import page, table

Metrics = Sequence[Mapping[str, Any]]

_PARTS = {"train/mtp_loss": "token after next", "train/balance_loss": "balance", "train/indexer_loss": "indexer"}
_GIB = 2**30


def run_sections(metrics: Metrics) -> dict[str, str]:
    """HTML by heading for a run of at least one step."""
    return {
        "Loss": _loss(metrics),
        "Load of the experts": _load(metrics),
        "What the indexer finds": _indexer(metrics),
        "Throughput": _throughput(metrics),
        "Training": table(_figures(metrics).items()),
    }


def run_page(name: str, metrics: Metrics) -> str:
    """The page of a run, finished or not."""
    last = metrics[-1]
    lead = f"{last['step']:,} steps, {last['tokens']:,} tokens."
    return page(f"Run {name}", run_sections(metrics), lead)


def _series(metrics: Metrics, key: str) -> list[Point]:
    return [(entry["step"], entry[key]) for entry in metrics if entry.get(key) is not None]


def _loss(metrics: Metrics) -> str:
    held_out = _series(metrics, "eval/loss")
    lines = {"batch": _series(metrics, "train/lm_loss")}
    told = "Next-token cross-entropy in nats per token: the line is each step's batch, the dots are held-out text."
    if not lines["batch"]:
        return "<p>No step had a finite loss.</p>"
    return f"<p>{told}</p>{curve(lines, 'step', 'nats per token', {'held out': held_out})}"


def _load(metrics: Metrics) -> str:
    lines = {"most": _series(metrics, "moe/load_max"), "least": _series(metrics, "moe/load_min")}
    if not lines["most"]:
        return ""
    told = "Tokens of the most and the least used expert of any layer, as multiples of an even share."
    return f"<p>{told}</p>{curve(lines, 'step', 'times an even share')}"


def _indexer(metrics: Metrics) -> str:
    recall = _series(metrics, "eval/indexer_recall")
    if not recall:
        return ""
    told = "Share of the entries that attention weighs most, among all visible ones, that the indexer chose."
    return f"<p>{told}</p>{curve({'recall': recall}, 'step', 'recall', {'recall': recall})}"


def _throughput(metrics: Metrics) -> str:
    rate = _series(metrics, "train/tokens_per_second")
    return curve({"tokens per second": rate}, "step", "tokens per second") if rate else ""


def _figures(metrics: Metrics) -> dict[str, str]:
    last = metrics[-1]
    rates = [rate for _, rate in _series(metrics, "train/tokens_per_second") if rate is not None]
    figures = {
        "steps": f"{last['step']:,}",
        "steps skipped, loss or gradient not finite": f"{last.get('train/skipped', 0):,}",
        "tokens": f"{last['tokens']:,}",
        "tokens per second, median of the steps": f"{median(rates):,.0f}" if rates else "unknown",
    }
    for convention in ("algorithmic", "reported"):
        work = [value for _, value in _series(metrics, f"train/tflops_{convention}") if value is not None]
        if work:
            figures[f"TFLOP/s, {convention} convention, median"] = f"{median(work):.4g}"
        share = [value for _, value in _series(metrics, f"train/mfu_{convention}") if value is not None]
        if share:
            figures[f"share of the GPU's peak, {convention} convention"] = f"{median(share):.2%}"
    if "memory/peak_bytes" in last:
        figures["peak memory"] = f"{last['memory/peak_bytes'] / _GIB:.2f} GiB"
    figures |= {f"{name} loss, last step": f"{last[key]:.4f}" for key, name in _PARTS.items() if last.get(key)}
    return figures
